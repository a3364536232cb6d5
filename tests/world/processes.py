"""A training run as a user starts it, for tests that kill, stop and resume it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conftest import SMALL, environment
from paceline import checkpoint


class Training:
    """A `paceline` process that trains in the background."""

    def __init__(self, folder: Path, *words: str, program: Sequence[str] = (sys.executable, "-m", "paceline")) -> None:
        self.run = folder / "run"
        self.process = subprocess.Popen(
            [*program, *words], cwd=folder, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something while the process lives."""
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.01)

    def saved(self, step: int) -> Callable[[], bool]:
        """Whether a checkpoint of this step or a later one is there."""
        return lambda: newest_step(self.run) >= step

    def replicas(self) -> list[int]:
        """The processes that this one started, lowest first."""
        listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == self.process.pid)

    def end(self, seconds: float = 120) -> tuple[int, str, str]:
        """Exit status, output and errors."""
        out, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, errors

    def kill(self) -> None:
        """SIGKILL, as a machine that goes away."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def write_small(folder: Path, **changes: str) -> str:
    """Put the small recipe into a folder; gives its file name."""
    text = SMALL
    for key, value in changes.items():
        text = "".join(f"{key}: {value}\n" if line.startswith(f"{key}:") else line for line in text.splitlines(True))
    (folder / "small.yaml").write_text(text)
    return "small.yaml"


def newest_step(run: Path) -> int:
    """The newest saved step, or -1."""
    return max(checkpoint.saved_steps(run / "checkpoints"), default=-1)


def fingerprint(run: Path) -> str:
    """SHA-256 of the state in the newest checkpoint."""
    files = checkpoint.read(run / "checkpoints" / checkpoint.name_of(newest_step(run)))
    return hashlib.sha256(b"".join(files[name] for name in sorted(files) if name != checkpoint.RECIPE)).hexdigest()
