"""Where a run's reports go while it trains: the terminal and CSV files."""

from __future__ import annotations

from paceline.record import Row


class Sink:
    """Takes a run's rows as they come; this one lets them go."""

    def step(self, step: int) -> None:
        """A step was done (nothing about it is known on the host yet)."""

    def judged(self, images: int) -> None:
        """About so many validation images were judged, of a validation that goes on."""

    def report(self, row: Row) -> None:
        """Losses were read."""

    def validation(self, row: Row) -> None:
        """The validation images were judged."""


class Several(Sink):
    """Hands everything on to several sinks."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def step(self, step: int) -> None:
        for sink in self._sinks:
            sink.step(step)

    def judged(self, images: int) -> None:
        for sink in self._sinks:
            sink.judged(images)

    def report(self, row: Row) -> None:
        for sink in self._sinks:
            sink.report(row)

    def validation(self, row: Row) -> None:
        for sink in self._sinks:
            sink.validation(row)
