"""Steps that are not finite: skipped, counted, stopped at, and looked into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import SMALL, Paceline
from paceline import checkpoint
from paceline.record import latest, rows_of


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(SMALL)
    return "small.yaml"


def test_bad_steps_are_skipped_and_counted_until_there_are_too_many_in_a_row(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    words = ["train", small, "optimiser.lr=1e30", "epochs=3", "--out", "run"]
    done = paceline(*words, "bad_steps_in_a_row=4")
    assert done.returncode == 1
    assert "the gradients of the last 4 steps were not finite" in done.stderr
    reports = latest(rows_of(tmp_path / "run"), "report")
    bad = reports[-1]["last_bad_step"]
    assert f"paceline repeat run --step {bad}" in done.stderr
    assert reports[-1]["bad_steps_in_a_row"] == 4
    assert reports[-1]["bad_steps"] == 4
    assert checkpoint.saved_steps(tmp_path / "run/checkpoints")[-1] == bad  # nothing is lost


def test_a_recipe_that_wants_no_bad_step_stops_at_the_first(paceline: Paceline, small: str, tmp_path: Path) -> None:
    done = paceline("train", small, "optimiser.lr=1e30", "epochs=3", "on_bad_step=stop", "--out", "run")
    assert done.returncode == 1
    last = latest(rows_of(tmp_path / "run"), "report")[-1]
    assert last["bad_steps"] == 1
    assert f"the gradient of step {last['last_bad_step']} was not finite, and on_bad_step is stop" in done.stderr


def test_a_bad_step_is_repeated_and_its_first_layer_and_images_are_named(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    paceline("train", small, "optimiser.lr=1e30", "epochs=3", "on_bad_step=stop", "--out", "run")
    bad = latest(rows_of(tmp_path / "run"), "report")[-1]["last_bad_step"]
    done = paceline("repeat", "run", "--step", str(bad), "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["layer"] is not None
    assert found["started_from"] < bad
    assert 1 <= len(found["images"]) <= 16
    assert all(0 <= number < 96 for number in found["images"])
    fine = paceline("repeat", "run", "--step", "1")
    assert fine.returncode == 0, fine.stderr
    assert "Every output and gradient of this step is finite here." in fine.stdout


def test_a_step_that_the_run_does_not_have_is_refused(paceline: Paceline, small: str) -> None:
    assert paceline("train", small, "--out", "run").returncode == 0
    for step in ("0", "7"):
        done = paceline("repeat", "run", "--step", step)
        assert done.returncode == 2
        assert f"--step {step}, and the run has steps 1 to 6" in done.stderr
