"""The promise with the optimizer's state in shares: the same run, also through a kill and a resume without shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_plan
from paceline.training.trials import Outcome, Trial, compare_outcomes

EXACT = 1e-12
STEPS = 4
LAMB = (
    "optimizer={name: lamb, lr: 0.01}",
    "clip={value: 1, norm: 0.5, adaptive: 0.1}",
    "ema={decay: 0.9}",
    "on.precision=fp64",
    "on.cpu_threads=1",
)
BF16 = ("optimizer={name: rmsprop, lr: 0.01}", "on.precision=bf16", "on.weights=bf16", "on.cpu_threads=1")
SHARES = ("on.shard=optimizer", "on.micro_batch=4")


def run(folder: Path, *words: str) -> Outcome:
    folder.mkdir()
    return Trial(folder, None, STEPS).finish(make_plan(*words))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("whole") / "run", *LAMB, "on.micro_batch=16")


ONE, THREE = ("on.micro_batch=16",), (*SHARES, "on.replicas=3")


@pytest.mark.parametrize(
    ("before", "after"),
    [(THREE, ONE), pytest.param(ONE, THREE, marks=pytest.mark.long)],
    ids=["with-then-without", "without-then-with"],
)
def test_a_killed_run_goes_on_without_its_shares_or_with_new_ones(
    tmp_path: Path, whole: Outcome, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    trial = Trial(tmp_path, None, STEPS)
    assert 1 <= trial.kill_after(make_plan(*LAMB, *before), 1) < STEPS
    found = compare_outcomes(whole, trial.finish(make_plan(*LAMB, *after)))
    assert max(found.values()) <= EXACT, found


def test_16_bit_weights_in_shares_are_the_same_bits(tmp_path: Path) -> None:
    without, shares = (
        run(tmp_path / name, *BF16, *words, "on.replicas=2")
        for name, words in (("without", SHARES[1:]), ("shares", SHARES))
    )
    assert max(compare_outcomes(without, shares).values()) == 0
    assert len(set(shares.losses)) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        "{name: sgd, lr: 0.1}",
        "{name: sgd, lr: 0.1, momentum: 0.9, nesterov: true}",
        "{name: lars, lr: 2, trust_coefficient: 0.02}",
        "{name: larc, lr: 0.1}",
        "{name: adamw, lr: 0.01}",
        "{name: muon, lr: 0.02}",
        "{name: rmsprop, lr: 0.01}",
    ],
)
def test_every_optimizer_is_the_same_run_with_shares(tmp_path: Path, optimizer: str, replicas: int) -> None:
    words = (f"optimizer={optimizer}", "weight_decay.rate=0.01", "on.precision=fp64", "on.cpu_threads=1")
    one = run(tmp_path / "one", *words, "on.micro_batch=16")
    shares = run(tmp_path / "shares", *words, *SHARES, f"on.replicas={replicas}")
    found = compare_outcomes(one, shares)
    assert max(found.values()) <= EXACT, found
