"""Ctrl-C on a terminal: answered at once, saved, and nothing left of the bar."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import newest_step, write_small

from conftest import environment
from paceline.record import rows_of


@pytest.mark.long
def test_an_interrupt_at_a_terminal_is_answered_and_saved(tmp_path: Path) -> None:
    words = ["train", write_small(tmp_path, epochs="100000"), "report=100 epochs", "--out", "run", "on.save=20 steps"]
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal,
        env=environment() | {"TERM": "xterm", "COLUMNS": "80"}, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    end = time.monotonic() + 120
    sent = False
    while time.monotonic() < end:
        try:
            shown += os.read(screen, 65536)
        except OSError:  # the other end is closed
            break
        if not sent and newest_step(tmp_path / "run") >= 20:
            os.kill(process.pid, 2)
            sent = True
    os.close(screen)
    assert process.wait(10) == 75
    text = shown.decode()
    assert "\\x1b" not in text  # what steers the terminal reached it as it is
    answer, saved = text.index("then saving; press again to stop without"), text.index("Interrupted after step")
    assert answer < saved
    assert text.rindex(" left") < text.rindex("\x1b[2K") < saved
    assert rows_of(tmp_path / "run")[-1]["kind"] == "interrupted"
