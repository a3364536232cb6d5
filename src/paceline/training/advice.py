"""Says once in a start that training waits for images, and what may help."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from paceline.data.inspect.check import Watch
from paceline.record import Row, Run
from paceline.sink import Sink


class Advice(Sink):
    """Listens to reports for the share of the time that went into waiting."""

    def __init__(self, watch: Watch, run: Run, console: Console) -> None:
        self._watch, self._run, self._console = watch, run, console

    def report(self, row: Row) -> None:
        said = self._watch.heard(row)
        if said is not None:
            self._run.log(said)
            self._console.print(f"[yellow]{escape(said)}[/yellow]", soft_wrap=True)
