"""Hands rows to a tracker in a thread of its own, so that one that fails or hangs cannot stop or slow a training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue

from paceline.model.packages import first_line
from paceline.planning import Plan
from paceline.record import RECORD, Row, Run, Sink, latest
from paceline.settings.read import cut
from paceline.sink.tracked import TRACKED, Tracker, tracked
from paceline.visible import plural

OpenTracker = Callable[[Plan, Path], Tracker]
"""Imports a tracker's package and opens it for the run in a folder; may take long, or raise."""
MOST_ROWS = 10_000
"""Rows that wait for a slow tracker; more are dropped."""
WAITS = {"end": 60.0, "interrupted": 10.0, "failed": 5.0}
"""Seconds that the last row of a start waits for a tracker to finish."""


class TrackingSink(Sink):
    """Sends the rows of a start that trains, each step once: steps that a resumed run trains again are not sent again.

    The training thread only puts rows into a queue. Rows of other commands come without a start and are left out.
    """

    def __init__(self, name: str, open_tracker: OpenTracker, plan: Plan, run: Run) -> None:
        self._name, self._open, self._plan, self._run = name, open_tracker, plan, run
        self._rows: Queue[Row] = Queue(MOST_ROWS)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._left = 0
        """Rows that the tracker did not get."""
        self._fault: str | None = None
        self._told = False

    def row(self, row: Row) -> None:
        kind = row["kind"]
        if kind == "start":
            before = [old for old in self._run.rows() if old.get("step", 0) <= row["step"]]
            rows = [old for kind in TRACKED for old in latest(before, kind)]
            self._thread = threading.Thread(target=self._work, args=(rows,), name=self._name, daemon=True)
            self._thread.start()
        elif self._thread is not None:
            if kind in TRACKED:
                self._put(row)
            if kind in WAITS:
                self._finish(self._thread, row)
            self._tell_fault()

    def _put(self, row: Row) -> None:
        if self._fault is None:
            try:
                self._rows.put_nowait(row)
            except Full:
                self._left += 1

    def _finish(self, thread: threading.Thread, last: Row) -> None:
        """Let the tracker finish, wait for it for a while, and say what it did not get."""
        self._thread = None
        try:
            self._rows.put_nowait(last)
            thread.join(WAITS[last["kind"]])
        except Full:
            self._closing.set()  # it hangs, or hopelessly lags behind
        hangs = thread.is_alive()
        self._closing.set()
        left = self._left + sum(row["kind"] in TRACKED for row in list(self._rows.queue))
        if self._fault is None and (left or hangs):
            why = "did not finish in time" if hangs else "was too slow"
            self._run.note(f"{self._name} {why} and lacks {plural(left, 'row')}; {RECORD} has them all", warning=True)

    def _tell_fault(self) -> None:
        """Note once, from the training thread, that the tracker is off."""
        if self._fault is not None and not self._told:
            self._told = True
            self._run.note(f"{self._name} is off until the next start: {self._fault}", warning=True)

    def _work(self, before: list[Row]) -> None:
        """Everything that the thread does; whatever the tracker raises ends it."""
        try:
            tracker = self._open(self._plan, self._run.folder)
            last = tracker.last_steps()
            for row in before:
                self._send(tracker, row, last)
            while not self._closing.is_set():
                row = self._rows.get()
                if row["kind"] in WAITS:
                    tracker.close(row["kind"])
                    return
                self._send(tracker, row, last)
        except Exception as fault:  # noqa: BLE001 - another program may raise anything
            self._fault = cut(f"{type(fault).__name__}: {first_line(fault)}")

    def _send(self, tracker: Tracker, row: Row, last: dict[str, int]) -> None:
        for one in tracked(row, self._run.folder):
            if one.step > last.get(one.section, -1) and not self._closing.is_set():
                tracker.send(one)
                last[one.section] = one.step
