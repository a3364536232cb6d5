"""Advice while a run trains: what would help where training waits for images in files."""

from __future__ import annotations

from pathlib import Path

from paceline.data.index.scan import open_index
from paceline.data.inspect.advice import advice
from paceline.errors import UserError
from paceline.planning import Plan
from paceline.record import Row, Run, Sink
from paceline.settings.data import Files

WAITING = 0.2
"""The fraction of the time that training may wait for images before it says so."""


class AdviceSink(Sink):
    """Notes once per start that training waits for images; the first report, or one cut short, does not count."""

    def __init__(self, plan: Plan, run: Run, folder: Path | None, cores: int) -> None:
        self._plan, self._run, self._folder, self._cores = plan, run, folder, cores
        self._reports, self._done = 0, False

    def row(self, row: Row) -> None:
        if row["kind"] != "report":
            return
        self._reports += 1
        whole = row["step"] < self._plan.steps if (rhythm := self._plan.reports) is None else rhythm.due(row["step"])
        waits = self._reports > 1 and whole and row["waiting"] > WAITING
        if self._done or not waits or not isinstance(self._plan.data, Files) or self._folder is None:
            return
        self._done = True
        try:
            table = open_index(self._plan.data, self._folder).training
        except (UserError, OSError):
            return  # files that have changed meanwhile must not end a run for the sake of advice
        self._run.note(advice(self._plan, row["waiting"], row["images_per_second"], table, self._cores), warning=True)
