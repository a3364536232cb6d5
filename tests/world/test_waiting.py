"""Asked to stop while images do not come: what was trained is saved, and the run goes on when they do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from processes import Training, fingerprint, newest_step

from image_files import PAGE, clean_pictures
from paceline.record import rows_of
from pictures_made import write_folder

HANGS = """
import os, time

def slow(picture, words):
    while os.path.exists("away") and (os.environ.get("RANK", "0") == "0" or "first" not in open("away").read()):
        time.sleep(0.02)
    return picture
"""
"""The images do not come while there is a file 'away': on any replica, or if it says so on the first only."""


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--replicas", "2")], ids=["one", "two"])
def test_a_signal_saves_a_run_whose_images_do_not_come(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_folder(clean_pictures(40), tmp_path / "data", 1 / 7)
    (tmp_path / "page.yaml").write_text(PAGE)
    (tmp_path / "mine.py").write_text(HANGS)
    own = ("augment.python=mine:slow", "evaluate.every=never", "on.keep_best=false", "epochs=40", "report=1 steps")
    run = ["train", "page.yaml", "--data", "data", "on.cpu_threads=1", "on.save=1000 steps", *own, *words]
    whole = Training(tmp_path, *run, "--out", "whole")
    assert whole.end()[0] == 0
    training = Training(tmp_path, *run, "--out", "run")
    record = tmp_path / "run/record.jsonl"
    training.wait_until(lambda: record.exists() and any(row["kind"] == "report" for row in rows_of(training.run)))
    (tmp_path / "away").write_text("first" if words else "")
    try:
        reported = -1
        while reported != (reported := len(rows_of(training.run))):  # until it stands still
            time.sleep(1)
        training.process.send_signal(signal.SIGUSR1)
        training.wait_until(lambda: newest_step(training.run) > 0)
    finally:
        (tmp_path / "away").unlink()
    status, _, errors = training.end()
    assert status == 75, errors
    steps = [row["step"] for row in rows_of(training.run) if row["kind"] == "report"]
    assert newest_step(training.run) == steps[-1]
    again = Training(tmp_path, *run, "--out", "run")
    assert again.end()[0] == 0
    whole.run = tmp_path / "whole"
    assert fingerprint(again.run) == fingerprint(whole.run)
