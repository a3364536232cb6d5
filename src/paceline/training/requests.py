"""Requests to stop, to save or to report: a signal or a clock makes them on one replica, and all replicas follow after
the same step."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ReadFailed
from paceline.starting import answered_signals
from paceline.world import Work, World

LAG = 4
"""Steps between a request and its fulfillment among several replicas, so that no step waits for the network."""


PATIENCE = 10.0
"""Seconds that one of several replicas, once asked to stop, still waits for images that the others may have."""


class Stopped(Exception):
    """A signal came to some replica in the middle of a validation or while it waited for images, and all have left."""


class Signals:
    """Takes the signals of `answered_signals` as a request to stop while it is entered; a second one exits at once.

    A second SIGHUP does not: a shell may repeat what the terminal has sent. `answer` is called as soon as the first
    signal comes, and `most_seconds` after entering it counts as asked too. Only the main thread of a process can listen
    to signals; in any other thread nothing is taken over.
    """

    def __init__(self, answer: Callable[[], None] | None = None, most_seconds: float | None = None) -> None:
        self.stop = False
        self._answer, self._most_seconds = answer, most_seconds
        self._asked_at = math.inf
        self._waits: tuple[float, Exception] | None = None
        self._armed = False
        self._first_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in answered_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
            if self._most_seconds is not None:
                self._asked_at = time.monotonic() + self._most_seconds
        return self

    def __exit__(self, *_: object) -> None:
        if self._armed:  # another alarm is somebody else's
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in self._previous.items():
            signal.signal(number, previous or signal.SIG_DFL)  # None: not set from Python

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if (
            number != signal.SIGHUP and self._first_at and now - self._first_at > 0.3
        ):  # launchers may deliver one signal twice
            os._exit(128 + number)
        first, self.stop = not self.stop, True
        self._first_at, self._asked_at = self._first_at or now, min(now, self._asked_at)
        if first and self._answer:
            self._answer()
        self._on_alarm()

    @contextmanager
    def abandoning(self, patience: float, fault: Exception) -> Iterator[None]:
        """What happens inside only waits; `patience` seconds after a request to stop it is left with the fault.

        A disk that does not answer must not cost what was trained.
        """
        if not self._previous:
            yield
            return
        self._waits = patience, fault
        try:
            self._on_alarm()
            yield
        finally:
            self._waits = None

    def _on_alarm(self, *_: object) -> None:
        """Leave what waits if it is time; else look again when it will be."""
        if self._waits is None or self._asked_at == math.inf:
            return
        patience, fault = self._waits
        left = self._asked_at + patience - time.monotonic()
        if left <= 0:
            self._waits = None
            raise fault
        signal.setitimer(signal.ITIMER_REAL, left)
        self._armed = True


class _Exchange(NamedTuple):
    """The requests of a step on their way."""

    step: int
    counts: Tensor
    """How many replicas ask to stop, how many to save and how many to report, once `work` is done."""
    work: Work
    event: torch.cuda.Event | None


class _Alarm:
    """Rings each time so many seconds have passed since it last rang; without seconds it never does."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._rang_at = seconds, time.monotonic()

    def rings(self) -> bool:
        """Whether it rings now."""
        now = time.monotonic()
        rings = self._seconds is not None and now - self._rang_at >= self._seconds
        if rings:
            self._rang_at = now
        return rings


class Requests:
    """Stop (a signal came to some replica, or its time is up), save and report (the first replica's clock says so).

    Each step sends three numbers over the host's own group, and reads those of LAG steps ago. All replicas read the
    same sums after the same step. On an accelerator each first waits for that earlier step to be done, so that no host
    runs far ahead of its device.
    """

    def __init__(
        self,
        world: World,
        signals: Signals | None = None,
        save_seconds: float | None = None,
        report_seconds: float | None = None,
        most_seconds: float | None = None,
    ) -> None:
        self._world, self._signals = world, signals or Signals()
        # Only the first replica's clock counts: those of the others would ask again a moment later.
        seconds = (save_seconds, report_seconds) if world.first else (None, None)
        self._saves, self._reports = (_Alarm(each) for each in seconds)
        self._began_at, self._most_seconds = time.monotonic(), most_seconds
        self._exchanges: deque[_Exchange] = deque()
        self.stop = False
        """Whether all replicas end after this step."""
        self.save = False
        """Whether all replicas save after this step."""
        self.report = False
        """Whether all replicas report after this step."""

    @property
    def urgent(self) -> bool:
        """Whether a signal came to this replica, though perhaps to no other, or its time is up."""
        return self._signals.stop or self.out_of_time

    @property
    def out_of_time(self) -> bool:
        """Whether this start has trained for as long as it may, and no signal came."""
        limit = self._most_seconds
        return not self._signals.stop and limit is not None and time.monotonic() - self._began_at >= limit

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside waits for images, which may never come: once asked to stop, it is left.

        One of several processes leaves only after a while, and then without the others, who find out.
        """
        alone = self._world.processes == 1
        fault = ReadFailed("asked to stop, and the images of the next step did not come; what was trained is saved")
        with self._signals.abandoning(0.0 if alone else PATIENCE, Stopped() if alone else fault):
            yield

    def exchange(self, step: int) -> None:
        """Send this replica's requests after a step, and let its own be what all have agreed on by now."""
        asked = [self.urgent, self._saves.rings(), self._reports.rings()]
        if self._world.processes == 1:
            self.stop, self.save, self.report = asked
            return
        counts = torch.tensor(asked, dtype=torch.int32)
        event = torch.cuda.Event() if self._world.device.type == "cuda" else None
        if event:
            event.record()
        self._exchanges.append(_Exchange(step, counts, self._world.all_reduce_async(counts, on_host=True), event))
        self.stop = self.save = self.report = False
        if self._exchanges[0].step <= step - LAG:
            self.stop, self.save, self.report = self._receive()

    def drain(self) -> None:
        """Receive what is still on its way, after the last step of all replicas."""
        while self._exchanges:
            self._receive()

    def _receive(self) -> list[bool]:
        oldest = self._exchanges.popleft()
        if oldest.event:
            oldest.event.synchronize()
        oldest.work.wait()
        return [count > 0 for count in oldest.counts.tolist()]
