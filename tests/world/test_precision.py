"""16-bit training: resumes are exact, replicas stay the same bits, and rounding by chance keeps small steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import Paceline, make_plan
from paceline.record import latest, rows_of
from paceline.training.trials import Trial, compare_outcomes

STEPS = 6


@pytest.mark.parametrize(("precision", "weights"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16")])
def test_a_killed_16_bit_run_goes_on_bit_for_bit(tmp_path: Path, precision: str, weights: str) -> None:
    plan = make_plan(f"on.precision={precision}", f"on.weights={weights}", "on.cpu_threads=1", "on.micro_batch=8")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = Trial(whole, None, STEPS).finish(plan)
    trial = Trial(killed, None, STEPS)
    assert 2 <= trial.kill_after(plan, 2) < STEPS
    found = trial.finish(plan)
    assert max(compare_outcomes(expected, found).values()) == 0
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert found.tensors["network.stem.conv.weight"].dtype == types[weights]
    assert found.tensors["optimizer.stem.conv.weight.momentum"].dtype == torch.float32


@pytest.mark.long
def test_16_bit_replicas_agree_with_one_on_the_first_loss_and_with_each_other(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(
        "{model: resnet8, data: {name: generated, images: 96, validation_images: 8, classes: 10, side: 8}, "
        "global_batch: 16, norm_batch: 4, epochs: 1, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}, "
        "schedule: constant, "
        "report: 1 steps}"
    )
    for replicas in ("1", "2"):
        words = [
            "train",
            "small.yaml",
            "--replicas",
            replicas,
            "on.precision=bf16",
            "on.weights=bf16",
            "on.micro_batch=4",
        ]
        done = paceline(*words, "--out", replicas)
        assert done.returncode == 0, done.stderr  # every report has compared the replicas' weights
    one, two = (latest(rows_of(tmp_path / name), "report") for name in ("1", "2"))
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-2)


def test_a_16_bit_replica_without_a_micro_batch_adds_zeros(tmp_path: Path) -> None:
    plan = make_plan("on.precision=bf16", "on.weights=bf16", "on.replicas=5", "on.micro_batch=4")
    assert len(Trial(tmp_path, None, 2).finish(plan).losses) == 2


def test_rounding_by_chance_can_be_turned_off(tmp_path: Path) -> None:
    outcomes = []
    for chance in ("true", "false"):
        folder = tmp_path / chance
        folder.mkdir()
        words = (
            "on.precision=bf16",
            "on.weights=bf16",
            f"on.stochastic_rounding={chance}",
            "on.micro_batch=16",
            "optimizer.lr=0.0001",
        )
        outcomes.append(Trial(folder, None, 4).finish(make_plan(*words)))
    by_chance, nearest = (outcome.tensors["network.stage3/unit1.conv2.weight"].float() for outcome in outcomes)
    # Steps this small vanish when rounded to the nearest; by chance some weights take them.
    assert not torch.equal(by_chance, nearest)


def test_gradients_that_travel_in_16_bits_change_rounding_only(tmp_path: Path) -> None:
    outcomes = []
    for word in ("on.communication=auto", "on.communication=bf16", "on.bucket=0"):
        folder = tmp_path / word
        folder.mkdir()
        outcomes.append(Trial(folder, None, 2).finish(make_plan(word, "on.replicas=2", "on.micro_batch=4")))
    auto, rounded, by_weight = outcomes
    assert rounded.losses[0] == auto.losses[0]
    assert rounded.losses[1] == pytest.approx(auto.losses[1], rel=1e-2)
    assert rounded.losses[1] != auto.losses[1]
    assert max(compare_outcomes(auto, by_weight).values()) <= 1e-6
