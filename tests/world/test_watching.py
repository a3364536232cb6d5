"""`paceline watch` at a terminal, beside three runs that train, are killed, and are resumed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import Training, write_small

from conftest import environment
from paceline.record import rows_of


class Terminal:
    """A `paceline watch` at a terminal of 80 x 24, and all that it writes."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "watch", *words], cwd=folder, start_new_session=True,
            stdin=terminal, stdout=terminal, stderr=terminal,
            env=environment() | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )  # fmt: skip
        os.close(terminal)
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._screen, 65536):
                self._written += chunk
        except OSError:  # the other end is closed
            pass

    def end(self) -> tuple[int, str]:
        """Exit status and all that was written."""
        status = self.process.wait(120)
        self._reader.join()
        os.close(self._screen)
        return status, self._written.decode()


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.long
def test_watching_follows_three_runs_through_kill_and_resume_to_their_end(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        (folder / "run").mkdir(parents=True)
    paths = [f"{folder.name}/run" for folder in folders]
    watching = Terminal(tmp_path, *paths)
    words = ["on.save=6 steps", "on.cpu_threads=1", "report=2 steps", "--out", "run"]
    start = ["train", str(tmp_path / write_small(tmp_path, epochs="30")), *words]
    for folder, step in zip(folders[:2], (12, 24), strict=True):
        training = Training(folder, *start)
        training.wait_until(training.saved(step))
        training.kill()
    trainings = [Training(folder, "resume", "run") for folder in folders[:2]]
    for training in [*trainings, Training(folders[2], *start)]:
        assert training.end()[0] == 0
    status, written = watching.end()
    assert status == 0
    assert all(rows_of(folder / "run")[-1]["kind"] == "end" for folder in folders)
    assert written.count("\x1b[?1049h") == written.count("\x1b[?1049l") == 1  # the other screen, there and back
    live, last = map(without_styles, written.split("\x1b[?1049l"))
    assert "training" in live
    assert last.count("ended") == 3
    assert last.count("step 180 of 180") == 3
    for path in paths[:2]:
        assert f"{path}: killed after step " in last


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_last_picture_and_status_0(tmp_path: Path, number: int) -> None:
    (tmp_path / "run").mkdir()
    watching = Terminal(tmp_path, "run")
    while b"no record yet" not in watching._written:
        assert watching.process.poll() is None
    watching.process.send_signal(number)
    status, written = watching.end()
    assert status == 0
    assert "Traceback" not in written
    assert without_styles(written.rpartition("\x1b[?1049l")[2]).split() == ["run", "no", "record", "yet"]
