"""The promise for optimizers that measure whole tensors: the same run on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_plan
from paceline.training.trials import Outcome, Trial, compare_outcomes

EXACT = 1e-12
STEPS = 4
LARS = (
    "optimizer={name: lars, lr: 2, trust_coefficient: 0.02, decay: 1e-4}",
    "clip={value: 1, norm: 0.5, adaptive: 0.1}",
)


def run(folder: Path, *words: str) -> Outcome:
    folder.mkdir()
    return Trial(folder, None, STEPS).finish(make_plan("on.precision=fp64", "on.cpu_threads=1", *words))


@pytest.mark.parametrize(
    "words", [LARS, ("optimizer={name: muon, lr: 0.02}", "weight_decay.rate=0.01")], ids=["lars", "muon"]
)
def test_layout_does_not_change_the_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    one = run(tmp_path / "one", *words, "on.micro_batch=16")
    two = run(tmp_path / "two", *words, "on.micro_batch=4", "on.replicas=2")
    largest = compare_outcomes(one, two)
    assert max(largest.values()) <= EXACT, largest
    assert len(set(one.losses)) == STEPS
