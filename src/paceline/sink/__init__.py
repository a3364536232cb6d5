"""Where a run's rows go. A sink is a function of a row plus one of progress; `on.sinks` names them."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from paceline.planning import Plan
from paceline.record import Run, Sink
from paceline.sink.console import ConsoleSink
from paceline.sink.csv import CsvSink
from paceline.sink.log import LogSink

SINKS: dict[str, Callable[[Plan, Run, Console], Sink]] = {
    "console": ConsoleSink,
    "csv": CsvSink,
    "log": LogSink,
}
"""Every sink by its name in `on.sinks`; each is made of the plan, the run and the terminal."""


def open_sinks(plan: Plan, run: Run, console: Console | None = None) -> list[Sink]:
    """The sinks that the placement names, in that order; without a console for a command that prints its own tables."""
    console = console or Console(quiet=True)
    return [SINKS[name](plan, run, console) for name in plan.placement.sinks]
