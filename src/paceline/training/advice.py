"""Says once in a start that training waits for images, and what may help."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from paceline.data.inspect.advice import InputAdvice
from paceline.record import Row, Run
from paceline.sink import Sink


class Advice(Sink):
    """Listens to reports for the share of the time that went into waiting."""

    def __init__(self, advice: InputAdvice, run: Run, console: Console) -> None:
        self._advice, self._run, self._console = advice, run, console

    def report(self, row: Row) -> None:
        sentence = self._advice(row)
        if sentence is not None:
            self._run.log(sentence)
            self._console.print(f"[yellow]{escape(sentence)}[/yellow]", soft_wrap=True)
