"""Members of several families as pipelines: gradients, norm sums, loss and update of a step are the whole network's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from conftest import make_plan
from paceline.command.verify import LIMIT
from paceline.planning import Plan
from paceline.training.lockstep import Lead
from paceline.training.trials import Trial

MEMBERS = {
    "resnet20": ("model=resnet20", "mix.mixup=0.2"),
    "resnet50": ("model=resnet50", "data.side=32", "mix.mixup=0.2", "optimizer={name: lars, lr: 1}"),
    "resnext29": ("model=resnext29", "data.side=16", "mix.mixup=0.2", "optimizer={name: adamw, lr: 0.01}"),
    "efficientnet-b0": (
        "model={name: efficientnet-b0, dropout: 0.3, survival: 0.7}",
        "data.side=32",
        "mix.cutmix=beta",
    ),
    "inception-v3": ("model={name: inception-v3, auxiliary: 0, dropout: 0.3}", "data.side=75", "mix.mixup=0.2"),
}
"""Between them: norms, mixing, dropout, stochastic depth, blocks with several ways through them."""
STAGES = {
    "2-stages": ("on.stages=2",),
    "3-stages": ("on.stages=3",),
    "4-stages": ("on.stages=4",),
    "2-stages-of-2-parts": ("on.stages=2", "on.virtual_stages=2"),
}
OTHERS = {
    "recomputed": ("on.recompute=all",),
    "2-x-2": ("on.stages=2", "on.replicas=2"),
    "2-x-2-over-norms": ("on.stages=2", "on.replicas=2", "on.micro_batch=2", "on.pipeline=interleaved"),
    "2-x-2-in-shares-recomputed": ("on.stages=2", "on.replicas=2", "on.shard=optimizer", "on.recompute=all"),
}


def plan_of(name: str, *words: str) -> Plan:
    recipe = ("clip.norm=1", "ema.decay=0.9", "mix.block=2", *MEMBERS[name])
    return make_plan("on.precision=fp64", "on.micro_batch=4", *recipe, *words)


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lead]:
    @cache
    def led(name: str) -> Lead:
        return Trial(tmp_path_factory.mktemp(name), None, 1).lead(plan_of(name, "on.micro_batch=16"))

    return led


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param((*words, f"on.pipeline={order}"), id=f"{stages}-{order}")
          for stages, words in STAGES.items() for order in ("grouped", "interleaved", "sequential")),
        *(pytest.param(words, id=name) for name, words in OTHERS.items()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", MEMBERS)
def test_a_step_in_stages_is_that_of_the_whole_network(
    tmp_path: Path, leader: Callable[[str], Lead], name: str, layout: tuple[str, ...]
) -> None:
    differences = Trial(tmp_path, None, 1).follow(plan_of(name, *layout), leader(name))
    assert all(found.judged <= LIMIT for found in differences.values()), differences
