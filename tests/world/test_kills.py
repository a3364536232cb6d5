"""A run that is killed, stopped or loses a replica, and what is left of it."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest
from processes import Training, fingerprint, newest_step, write_small

from paceline.record import latest, rows_of

TIMES = {"step_seconds", "images_per_second", "waiting", "total_seconds", "seconds", "memory"}
LONG = {"epochs": "100"}


def lessons(run: Path) -> list[dict[str, object]]:
    """The record without what depends on the clock."""
    rows = rows_of(run)
    kept = latest(rows, "report") + latest(rows, "validation")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in kept]


def has_begun(run: Path, starts: int) -> bool:
    return len([row for row in rows_of(run) if row["kind"] == "start"]) == starts


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_kills_at_random_moments_leave_the_uninterrupted_run(tmp_path: Path, kills: int) -> None:
    words = ["train", write_small(tmp_path, epochs="40"), "on.save=7 steps", "on.cpu_threads=1"]
    whole = Training(tmp_path, *words, "--out", "whole")
    assert whole.end()[0] == 0
    whole.run = tmp_path / "whole"
    steps = newest_step(whole.run)
    moments = sorted(random.Random(5).sample(range(1, steps - 140), kills))  # training may be ahead of the disk
    for number, moment in enumerate(moments, 1):
        part = Training(tmp_path, *words, "--out", "run")
        part.wait_until(partial(has_begun, part.run, number))  # an earlier start may have saved that step already
        part.wait_until(part.saved(moment))
        part.kill()
    assert newest_step(tmp_path / "run") < steps, "the last kill came too late to mean anything"
    last = Training(tmp_path, "resume", "run")
    assert last.end()[0] == 0
    assert fingerprint(last.run) == fingerprint(whole.run)
    assert lessons(last.run) == lessons(whole.run)
    assert sum(row["kind"] == "start" for row in rows_of(last.run)) == kills + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    training = Training(tmp_path, "train", write_small(tmp_path, **LONG), "--out", "run", "on.save=50 steps")
    training.wait_until(training.saved(50))
    training.process.send_signal(number)
    status, out, _ = training.end()
    assert status == 75
    assert "paceline resume" in out
    last = rows_of(training.run)[-1]
    assert last["kind"] == "interrupted"
    assert last["step"] == newest_step(training.run)


@pytest.mark.long
def test_replicas_stop_together_and_the_run_goes_on_alone(tmp_path: Path) -> None:
    words = ["train", write_small(tmp_path, epochs="30"), "--out", "run", "on.save=20 steps", "--replicas", "2"]
    training = Training(tmp_path, *words)
    training.wait_until(training.saved(20))
    training.process.send_signal(signal.SIGTERM)
    status, _, errors = training.end()
    assert (status, errors) == (75, "")
    assert rows_of(training.run)[-1]["kind"] == "interrupted"
    alone = Training(tmp_path, "resume", "run", "on.replicas=1")
    assert alone.end()[0] == 0
    assert rows_of(training.run)[-1]["kind"] == "end"


@pytest.mark.long
def test_replicas_leave_a_validation_together(tmp_path: Path) -> None:
    recipe = write_small(
        tmp_path, data="{name: generated, images: 96, validation_images: 400000, classes: 10, side: 8}"
    )
    training = Training(tmp_path, "train", recipe, "--out", "run", "--replicas", "2")
    training.wait_until(lambda: any(row["kind"] == "report" and row["step"] == 6 for row in rows_of(training.run)))
    training.process.send_signal(signal.SIGTERM)
    status, _, errors = training.end()
    assert (status, errors) == (75, "")
    rows = rows_of(training.run)
    assert (rows[-1]["kind"], rows[-1]["step"], newest_step(training.run)) == ("interrupted", 6, 6)
    assert not any(row["kind"] == "validation" for row in rows)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_replica_ends_the_run_with_one_line_and_loses_nothing_saved(tmp_path: Path, which: int) -> None:
    words = ["train", write_small(tmp_path, **LONG), "--out", "run", "on.save=20 steps", "--replicas", "2"]
    training = Training(tmp_path, *words)
    training.wait_until(training.saved(20))
    os.kill(training.replicas()[which], signal.SIGKILL)
    status, _, errors = training.end()
    assert status == 1
    assert errors.count("\n") == 1
    assert f"replica {which} was killed by SIGKILL" in errors
    assert fingerprint(training.run)


@pytest.mark.long
def test_a_replica_that_hangs_is_named(tmp_path: Path) -> None:
    words = [
        "train",
        write_small(tmp_path, **LONG),
        "--out",
        "run",
        "on.save=20 steps",
        "--replicas",
        "2",
        "on.timeout=4",
    ]
    training = Training(tmp_path, *words)
    training.wait_until(training.saved(20))
    hung = training.replicas()[1]
    os.kill(hung, signal.SIGSTOP)
    try:
        training.wait_until(lambda: '"failed"' in (training.run / "record.jsonl").read_text())
    finally:
        os.kill(hung, signal.SIGKILL)
    status, _, errors = training.end()
    assert status == 1
    assert json.loads((training.run / "record.jsonl").read_text().splitlines()[-1])["why"].startswith(
        "replica 1 stopped"
    )
    assert errors.count("\n") == 1


def test_a_second_trainer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    words = ["train", write_small(tmp_path, **LONG), "--out", "run"]
    first = Training(tmp_path, *words)
    first.wait_until(first.saved(0))
    status, _, errors = Training(tmp_path, *words).end()
    assert status == 2
    assert "another process is training in this folder" in errors
    first.kill()
