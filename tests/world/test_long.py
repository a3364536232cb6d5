"""The long suites: every network, the demo's accuracy, the full proof, compilation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Paceline, make_plan
from paceline.model.tables import MEMBERS, member
from paceline.record import latest, rows_of
from paceline.train.prove import Trial, differences

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", [row.name for row in MEMBERS])
def test_every_network_is_the_same_run_on_two_layouts(tmp_path: Path, name: str) -> None:
    # Norms over a handful of numbers and the explosive start of deep networks would only measure how rounding grows.
    side = 64 if member(name).side == 224 else 16
    words = ["on.precision=64.64", f"model={name}", f"data.side={side}", "norm_batch=8", "optimiser.lr=0.001"]
    words.append("init.zero_gamma=residual")
    outcomes = []
    for replicas, micro_batch in ((1, 16), (2, 4)):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        plan = make_plan(*words, f"on.replicas={replicas}", f"on.micro_batch={micro_batch}")
        outcomes.append(Trial(folder, None, 2).finish(plan))
    assert max(differences(*outcomes).values()) <= 1e-12


def test_the_demo_reaches_95_percent(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("train", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert latest(rows_of(tmp_path / "run"), "validation")[-1]["top1"] >= 0.95


def test_verify_passes_on_the_demo_recipe(paceline: Paceline) -> None:
    done = paceline("verify", "shapes/resnet8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["largest_difference"] <= 1e-12


def test_compilation_changes_rounding_only(paceline: Paceline, tmp_path: Path) -> None:
    words = ["train", "shapes/resnet8", "epochs=0.06", "report=1 steps", "on.precision=64.64", "on.micro_batch=64"]
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
