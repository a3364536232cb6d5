"""Replicas that share one CUDA device exchange by gloo, because NCCL wants a device for each, and are the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import make_plan
from paceline.planning import Plan
from paceline.training.trials import Trial, compare_outcomes

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(torch.cuda.device_count() != 1, reason="not exactly one CUDA device"),
]
STEPS = 4
ROUNDING = 1e-9
"""Far more than float64 leaves after a few steps, and far less than any fault of an exchange."""


def plan_of(*words: str) -> Plan:
    return make_plan("on.device=cuda", "on.precision=fp64", *words)


@pytest.mark.parametrize(
    "words",
    [
        ("on.micro_batch=4",),
        ("on.micro_batch=2",),  # a norm group spans both
        ("on.micro_batch=4", "on.shard=optimizer"),
    ],
    ids=str,
)
def test_replicas_on_one_device_are_the_same_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trial(tmp_path / "whole", None, STEPS)
    parted = Trial(tmp_path / "parted", None, STEPS)
    for folder in ("whole", "parted"):
        (tmp_path / folder).mkdir()
    expected = whole.finish(plan_of("on.micro_batch=16"))
    with monkeypatch.context() as launcher:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            launcher.setenv(name, value)
        plan = plan_of("on.replicas=2", *words)
    assert max(compare_outcomes(expected, parted.finish(plan)).values()) <= ROUNDING
