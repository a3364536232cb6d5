"""Runs that end early, by their validations or by the clock, and what they say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SMALL, Paceline
from paceline.record import rows_of

STOP = ["stop.patience=2 validations", "evaluate.every=1 steps", "epochs=20", "on.precision=fp64"]


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(SMALL)
    return "small.yaml"


def test_a_run_that_validations_end_is_complete(paceline: Paceline, small: str, tmp_path: Path) -> None:
    done = paceline("train", small, *STOP, "--out", "run")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    stop = next(row for row in rows if row["kind"] == "stop")
    assert rows[-1]["kind"] == "end"
    assert rows[-1]["step"] == stop["step"] < 120
    assert (stop["reason"], stop["no_better"]) == ("patience", 2)
    best = f"{stop['best']:.2%} after step {stop['best_step']}"
    said = f"Ended after step {stop['step']} of 120: 2 validations in a row had no better top-1 than {best}"
    assert said in done.stdout.splitlines()
    assert f"ended by patience at step {stop['step']}" in (tmp_path / "run/log.txt").read_text()
    again = paceline("resume", "run")
    assert (again.returncode, again.stdout) == (0, f"This run is complete: {stop['step']} steps are trained. run\n")


@pytest.mark.long
def test_replicas_end_after_the_same_step_as_one(paceline: Paceline, small: str, tmp_path: Path) -> None:
    assert paceline("train", small, *STOP, "--out", "one").returncode == 0
    several = paceline("train", small, *STOP, "--out", "two", "on.replicas=2", "on.micro_batch=4")
    assert several.returncode == 0, several.stderr
    kept = [
        [(row["step"], row["best_step"], row["reason"]) for row in rows_of(tmp_path / name) if row["kind"] == "stop"]
        for name in ("one", "two")
    ]
    assert len(kept[0]) == 1
    assert kept[0] == kept[1]


def test_the_time_limit_of_a_start_saves_and_resume_continues(paceline: Paceline, small: str, tmp_path: Path) -> None:
    words = ["epochs=5000", "evaluate.every=5000 epochs", "report=5000 epochs"]
    done = paceline("train", small, *words, "--time-limit", "3 seconds", "--out", "run")
    assert done.returncode == 75, done.stderr
    last = rows_of(tmp_path / "run")[-1]
    assert (last["kind"], last["why"]) == ("interrupted", "time limit")
    assert last["step"] > 0
    assert done.stdout.splitlines()[-2:] == [
        f"The time limit of 3 seconds is reached after step {last['step']} of 30000; saved. Continue with:",
        "paceline resume run",
    ]
    more = paceline("resume", "run", "--time-limit", "1 second")
    assert more.returncode == 75, more.stderr
    assert rows_of(tmp_path / "run")[-1]["step"] > last["step"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("90", "expected an amount with its unit (seconds, minutes or hours), such as '90 seconds'"),
        ("3 epochs", "'3 epochs' is no time on the clock; write seconds, minutes or hours"),
        ("0 hours", "must be greater than zero, such as '1 second'"),
    ],
)
def test_a_time_limit_is_a_time(paceline: Paceline, small: str, limit: str, message: str) -> None:
    done = paceline("train", small, "--time-limit", limit, "--out", "run")
    assert done.returncode == 2
    assert done.stderr == f"error: 'on.time_limit={limit}': time_limit: {message}\n"
