"""Signals that ask a command to stop; before it trains it ends with the status by which schedulers start it again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from paceline.errors import INTERRUPTED, StoppedEarly

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to stop; the last one comes when a terminal is closed."""
EARLY_STOPS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they end a job."""
_LINE = b"Interrupted before training began; nothing new is saved. Run the same command again to go on.\n"
_training = threading.Event()


def answered_signals(numbers: tuple[signal.Signals, ...] = STOPS) -> list[signal.Signals]:
    """Those of these signals that this process answers: one started by nohup outlives its terminal."""
    outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (outlives and number == signal.SIGHUP)]


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, until this process trains, a signal of a scheduler ends it at once, with a line and status 75."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _training.clear()
    previous = {number: signal.signal(number, _on_signal) for number in EARLY_STOPS}
    try:
        yield
    except StoppedEarly:
        _tell()
        sys.exit(INTERRUPTED)
    finally:
        for number, action in previous.items():
            signal.signal(number, action or signal.SIG_DFL)


def training_begins() -> None:
    """From here on others answer signals; one that comes after them means what it means to any process."""
    _training.set()


def _on_signal(number: int, _: FrameType | None) -> None:
    if _training.is_set():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _tell()
    os._exit(INTERRUPTED)  # an exception could get lost in what is being imported


def _tell() -> None:
    """Say it past Python's buffer, which may be in use where the signal came."""
    with suppress(OSError, RuntimeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(1, _LINE)
