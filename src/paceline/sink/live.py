"""The live display of a run that trains at a terminal: drawn by its own timer, from numbers that are there already."""

from __future__ import annotations

import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from paceline.record import Row
from paceline.sink.bar import DOING
from paceline.sink.panel import Doing, bars, numbers, problems
from paceline.sink.status import Status

PICTURES = 4
"""Pictures a second."""
_ROOM = 3
"""Columns that stay free for the ^C of a terminal: a line that ran on into the next would stay there."""


class LiveDisplay:
    """Bars and numbers at the bottom of a terminal; what is printed meanwhile appears above them.

    Drawing happens in rich's thread. The training thread only says what is new, and waits for nothing.
    """

    def __init__(self, console: Console) -> None:
        self._status = Status()
        self._doing: Doing | None = None
        self._starting: Doing | None = None
        """Until the first step is done, which may have to compile and to choose kernels."""
        self._live = Live(console=console, get_renderable=lambda: self, refresh_per_second=PICTURES, transient=True)

    def start(self, rows: list[Row]) -> None:
        """Show the display, of a run whose record has these rows so far."""
        for row in rows:
            self._status.take(row, time.monotonic())
        self._starting = Doing("starting", 0, 0, time.monotonic())
        self._live.start()

    def row(self, row: Row) -> None:
        """Take a row; the last one of a start wipes the display."""
        if row["kind"] == "start":
            return  # the record has it, with all that came before
        self._status.take(row, time.monotonic())
        if row["kind"] == "validation-start":
            self.progress("validation", 0, 0)
        elif row["kind"] != "note":
            self._doing = None
        if self._status.is_over:
            self._live.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Take how far something has come."""
        if what == "training":
            self._status.step, self._starting = done, None
            return
        doing, verb = self._doing, DOING.get(what, what)
        same = doing is not None and doing.what == verb
        self._doing = Doing(verb, done, total, doing.began_at if doing and same else time.monotonic())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, now, status = max(1, options.max_width - _ROOM), time.monotonic(), self._status
        drawn = bars(status, self._doing or self._starting, now, width, options.ascii_only)
        yield Text("\n").join([*drawn, *numbers(status, now, width), *problems(status, width)])
