"""The long suites: the demo's accuracy, the full proof, compilation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Paceline
from paceline.record import latest, rows_of

pytestmark = pytest.mark.long


def test_the_demo_reaches_95_percent(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("train", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert latest(rows_of(tmp_path / "run"), "validation")[-1]["top1"] >= 0.95


def test_verify_passes_on_the_demo_recipe(paceline: Paceline) -> None:
    done = paceline("verify", "shapes/resnet8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["largest_difference"] <= 1e-12


def test_compilation_changes_rounding_only(paceline: Paceline, tmp_path: Path) -> None:
    words = ["train", "shapes/resnet8", "epochs=0.06", "report=1 steps", "on.precision=fp64", "on.micro_batch=64"]
    for compiled in ("false", "true"):
        done = paceline(*words, "--out", compiled, f"on.compile={compiled}")
        assert done.returncode == 0, done.stderr
    for kind in ("report", "validation"):
        plain, fused = (latest(rows_of(tmp_path / name), kind) for name in ("false", "true"))
        assert [row["loss"] for row in fused] == pytest.approx([row["loss"] for row in plain], rel=1e-9)


def test_saving_by_the_clock_saves_on_all_replicas_alike(paceline: Paceline, tmp_path: Path) -> None:
    words = ["train", "shapes/resnet8", "epochs=0.5", "--replicas", "2", "on.save=1 seconds", "on.keep_last=99"]
    done = paceline(*words, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run/checkpoints").iterdir())) >= 3
