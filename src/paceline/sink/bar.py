"""A bar for validating and averaging outside the training, whose commands print tables of their own."""

from __future__ import annotations

from paceline.progress import Progress
from paceline.record import Row, Sink

DOING = {"validation": "validating"}
"""What is being done, where `progress` says what comes of it."""


class BarSink(Sink):
    """Shows how far something is and leaves rows alone."""

    def __init__(self, show: Progress) -> None:
        self._show = show

    def row(self, row: Row) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        self._show(DOING.get(what, what), done, total)
