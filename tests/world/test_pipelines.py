"""A pipeline of stages is the same run as the whole network: each step, each checkpoint and each validation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Training, write_small

from conftest import make_plan
from exchange_seen import SeenTrial
from paceline.record import Run
from paceline.training.trials import Outcome, Trial, compare_outcomes

EXACT = 1e-12
STEPS = 4
VIRTUAL = ("on.stages=2", "on.virtual_stages=2")
NETWORKS = {
    "resnet20": ("model=resnet20", "mix.mixup=0.2", "optimizer={name: lars, lr: 0.5}", "clip.norm=1", "ema.decay=0.9"),
    "efficientnet-cifar": (
        "model={name: efficientnet-cifar, dropout: 0.3, survival: 0.7}", "mix.cutmix=beta", "norm.epsilon=0.1",
        "augment.side={0 steps: 6, 2 steps: 8}",
    ),
    "googlenet": ("model={name: googlenet, dropout: 0.2}", "data.side=32", "mix.mixup=0.3", "norm.epsilon=0.1"),
}  # fmt: skip
"""Between them: norms, mixing, dropout, stochastic depth, auxiliary heads, clipping over stages, changing sides."""


def plan_of(*words: str) -> Any:
    return make_plan("on.precision=fp64", "on.micro_batch=4", *words)


def run(folder: Path, *words: str) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    return Trial(folder, None, STEPS).finish(plan_of(*words))


def differs(one: Outcome, other: Outcome) -> float:
    assert one.tensors.keys() == other.tensors.keys()
    return max(compare_outcomes(one, other).values())


@pytest.mark.parametrize("layout", [pytest.param(("on.stages=2",), marks=pytest.mark.long), VIRTUAL], ids=str)
def test_two_stages_are_the_same_run_as_the_whole_network(tmp_path: Path, layout: tuple[str, ...]) -> None:
    recipe = ("data.images=64", "global_batch=8", "loss.class_weights=balanced")
    words = ("mix.mixup=0.3", "ema.decay=0.9", "clip.norm=1", *recipe)
    staged = run(tmp_path / "staged", *words, *layout, "on.pipeline=interleaved")
    assert differs(run(tmp_path / "whole", *words), staged) <= EXACT


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return {name: run(tmp_path_factory.mktemp(name), *words) for name, words in NETWORKS.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "order"),
    [(("on.stages=3",), "sequential"), (("on.stages=2",), "grouped"), (VIRTUAL, "interleaved")],
    ids=["3-stages", "2-stages", "2-stages-of-2-parts"],
)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_order_of_passes_gives_the_same_run(
    tmp_path: Path, wholes: dict[str, Outcome], network: str, layout: tuple[str, ...], order: str
) -> None:
    staged = run(tmp_path, *NETWORKS[network], *layout, f"on.pipeline={order}")
    assert differs(wholes[network], staged) <= EXACT


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        (), ("norm_batch=8",), ("on.recompute=all",), ("global_batch=12",), ("norm_batch=8", "on.virtual_stages=2"),
        ("on.recompute=all", "on.virtual_stages=2"), ("global_batch=12", "on.virtual_stages=2", "on.bucket=0"),
    ],
    ids=str,
)  # fmt: skip
def test_replicas_of_two_stages_are_the_same_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    recipe = [word for word in words if not word.startswith("on.")]
    if "global_batch=12" in words:  # the second replica has no micro-batch in the last round
        recipe.append("data.images=48")
    layout = [word for word in words if word.startswith("on.")]
    one = run(tmp_path / "one", *recipe, "on.micro_batch=12" if "global_batch=12" in words else "on.micro_batch=16")
    splits = "[stage1, stage2, head]" if "on.virtual_stages=2" in words else "stage2"
    four = run(tmp_path / "four", *recipe, *layout, "on.stages=2", "on.replicas=2", f"on.splits={splits}")
    assert differs(one, four) <= EXACT


@pytest.mark.parametrize(
    "order", ["interleaved", *(pytest.param(order, marks=pytest.mark.long) for order in ("grouped", "sequential"))]
)
def test_gradients_leave_each_stage_while_its_last_backward_pass_runs(tmp_path: Path, order: str) -> None:
    # The second replica has a micro-batch less than the first one.
    recipe = ("global_batch=20", "data.images=80", "mix.mixup=0.3")
    layout = ("on.stages=2", "on.replicas=2", "on.splits=stage2", f"on.pipeline={order}", "on.bucket=0")
    trial = SeenTrial(tmp_path, None, STEPS)
    assert differs(run(tmp_path / "whole", *recipe), trial.finish(plan_of(*recipe, *layout))) <= EXACT
    weights = [9, 14]
    """Of stem and stage1, and of the rest."""
    assert [trial.left_early(process) for process in range(4)] == [STEPS * count for count in weights * 2]


@pytest.mark.long
@pytest.mark.parametrize("splits", ["stage2", "head"])
@pytest.mark.parametrize(
    "optimizer",
    [
        ("optimizer={name: lamb, lr: 0.01}", "clip={value: 1, norm: 0.5, adaptive: 0.1}", "ema.decay=0.9"),
        ("optimizer={name: muon, lr: 0.02}", "weight_decay.rate=0.01"),
        ("optimizer={name: sgd, lr: 0.1}",),
    ],
    ids=["lamb", "muon", "without-state"],
)
def test_each_stage_may_keep_its_state_in_shares_of_its_replicas(
    tmp_path: Path, optimizer: tuple[str, ...], splits: str
) -> None:
    layout = ("on.stages=2", "on.replicas=2", f"on.splits={splits}", "on.shard=optimizer")
    shares = run(tmp_path / "shares", *optimizer, *layout)
    assert differs(run(tmp_path / "whole", *optimizer), shares) <= EXACT


def test_a_pipeline_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    words = ("ema.decay=0.9", "mix.mixup=0.3", "on.stages=2", "on.replicas=2", "on.shard=optimizer")
    undisturbed, folder = run(tmp_path / "undisturbed", *words), tmp_path / "killed"
    folder.mkdir()
    killed = Trial(folder, None, STEPS)
    assert 1 <= killed.kill_after(plan_of(*words), 1) < STEPS
    assert differs(undisturbed, killed.finish(plan_of(*words))) == 0


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_16_bit_weights_of_a_pipeline_are_the_same_bits(tmp_path: Path, replicas: int) -> None:
    words = ("optimizer={name: rmsprop, lr: 0.01}", "on.precision=bf16", "on.weights=bf16", "on.micro_batch=4")

    def bits(name: str, *layout: str) -> Outcome:
        (tmp_path / name).mkdir()
        return Trial(tmp_path / name, None, STEPS).finish(make_plan(*words, f"on.replicas={replicas}", *layout))

    assert differs(bits("whole"), bits("staged", "on.stages=2")) == 0


@pytest.mark.long
def test_a_run_killed_as_a_pipeline_goes_on_whole_and_the_other_way_round(tmp_path: Path) -> None:
    recipe = ("ema.decay=0.9", "optimizer={name: adamw, lr: 0.01, epsilon: 0.01}")
    undisturbed = run(tmp_path / "undisturbed", *recipe)
    shares = ["on.stages=2", "on.replicas=2", "on.shard=optimizer", "on.virtual_stages=2"]
    layouts: tuple[list[str], ...] = ([], ["on.stages=2"], ["on.stages=3", "on.replicas=2"], shares)
    for number, (first, second) in enumerate([(0, 1), (1, 0), (1, 2), (1, 1), (3, 0), (0, 3), (3, 2)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        trial = Trial(folder, None, STEPS)
        assert 1 <= trial.kill_after(plan_of(*recipe, *layouts[first]), 1) < STEPS
        resumed = trial.finish(plan_of(*recipe, *layouts[second]))
        assert differs(undisturbed, resumed) <= EXACT


@pytest.mark.long
@pytest.mark.parametrize("splits", [("on.splits=stage3",), ("on.splits=[stage1, stage2, head]", "on.virtual_stages=2")])
def test_a_pipeline_validates_every_image_once_and_is_judged_whole_later(
    tmp_path: Path, splits: tuple[str, ...]
) -> None:
    write_small(tmp_path)
    words = ("evaluate.flip=true", "average.last=2", "average.every=2 steps")
    layout = ("on.stages=2", "on.replicas=2", *splits, "on.micro_batch=4", "on.precision=fp64")
    status, _, errors = Training(tmp_path, "train", "small.yaml", *words, *layout, "--out", "run").end()
    assert status == 0, errors
    status, _, errors = Training(tmp_path, "validate", "run").end()
    assert status == 0, errors
    rows = Run(tmp_path / "run", "read").rows()
    staged, judged = (row for row in rows if row["kind"] == "validation")
    assert staged["images"] == judged["images"] == 37
    assert staged["loss"] == pytest.approx(judged["loss"], rel=EXACT)
    assert next(row for row in rows if row["kind"] == "average")["images"] == 37
    start = next(row for row in rows if row["kind"] == "start")
    assert start["parameters"] == 75_290
    assert sorted(start["forms"]) == sorted(["stem", "stage1/unit1", "stage2/unit1", "stage3/unit1", "head"])
    begins = "stem, stage3/unit1" if len(splits) == 1 else "stem, stage1/unit1, stage2/unit1, head"
    assert any(row["kind"] == "note" and f"stages begin at {begins}, and" in row["text"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("layout", [("on.stages=2", "on.pipeline=interleaved"), VIRTUAL], ids=str)
def test_a_pipeline_that_loses_a_stage_says_so_in_one_line(tmp_path: Path, layout: tuple[str, ...]) -> None:
    words = ("train", write_small(tmp_path, epochs="200"), *layout, "on.micro_batch=4", "--out", "run")
    training = Training(tmp_path, *words)
    training.wait_until(training.saved(2))
    os.kill(training.replicas()[1], signal.SIGKILL)
    status, _, errors = training.end()
    assert status == 1
    assert errors.splitlines() == [
        "error: replica 1 was killed by SIGKILL; the others were stopped, and what was saved is whole"
    ]


@pytest.mark.long
def test_a_pipeline_stops_saved_at_a_signal_and_is_resumed_whole(tmp_path: Path) -> None:
    recipe = write_small(tmp_path, epochs="30", report="10 steps")
    layout = ("on.stages=2", "on.micro_batch=4", "on.save=1 steps")
    training = Training(tmp_path, "train", recipe, *layout, "--out", "run")
    training.wait_until(training.saved(2))
    training.process.terminate()
    status, out, errors = training.end()
    assert status == 75, (out, errors)
    assert Run(tmp_path / "run", "read").rows()[-1]["kind"] == "interrupted"
    words = ("resume", "run", "on.stages=1", "on.splits=[]", "on.save=50 epochs")
    status, out, errors = Training(tmp_path, *words).end()
    assert status == 0, (out, errors)
    starts = [row for row in Run(tmp_path / "run", "read").rows() if row["kind"] == "start"]
    assert [start["placement"]["stages"] for start in starts] == [2, 1]
    assert starts[1]["step"] >= 2
