"""The promise with everything on: class weights, mixing, stochastic depth, dropout, an average, LARS and clipping."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_plan
from paceline.training.trials import Outcome, Trial, compare_outcomes

EXACT = 1e-12
STEPS = 4
EVERYTHING = """
model: {name: efficientnet-cifar, width: 0.25, depth: 0.5, dropout: 0.2, survival: 0.5}
data: {name: generated, images: 96, validation_images: 8, classes: 10, side: 16}
global_batch: 16
norm_batch: 8
epochs: 2
optimizer: {name: lars, lr: 0.05, decay: 1e-4}
weight_decay: {rate: 5e-5, skip_names: [norm]}
clip: {norm: 5.0}
schedule: {name: cosine, warmup: 2 steps}
loss: {label_smoothing: 0.1, class_weights: balanced}
augment: {pad: 2, flip: true}
mix: {mixup: 0.2, cutmix: {name: logarithmic, kept: 0.85}, block: 4}
ema: {decay: 0.9}
"""


def run(folder: Path, *words: str) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    return Trial(folder, None, STEPS).finish(make_plan("on.precision=fp64", *words, text=EVERYTHING))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("whole"), "on.micro_batch=16")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("on.micro_batch=8", "on.recompute=all"), marks=pytest.mark.long),
        ("on.micro_batch=4", "on.replicas=2"),
        pytest.param(("on.micro_batch=8", "on.replicas=3"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_layout_does_not_change_the_run_with_everything_on(
    tmp_path: Path, whole: Outcome, words: tuple[str, ...]
) -> None:
    found = compare_outcomes(whole, run(tmp_path, *words))
    assert max(found.values()) <= EXACT, found


def test_a_killed_run_goes_on_exactly_with_everything_on(tmp_path: Path, whole: Outcome) -> None:
    plan = make_plan("on.precision=fp64", "on.micro_batch=16", text=EVERYTHING)
    trial = Trial(tmp_path, None, STEPS)
    assert 2 <= trial.kill_after(plan, 2) < STEPS
    assert max(compare_outcomes(whole, trial.finish(plan)).values()) == 0
