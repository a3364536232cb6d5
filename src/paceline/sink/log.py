"""log.txt: one line, with the time, for each start, end, failure and note."""

from __future__ import annotations

import time

from rich.console import Console

from paceline.errors import Broken
from paceline.files import disk_faults
from paceline.planning import Plan
from paceline.record import INTACT, Row, Run, Sink
from paceline.visible import one_line

LOG = "log.txt"


class LogSink(Sink):
    """Appends lines to the log of a run."""

    def __init__(self, plan: Plan, run: Run, _console: Console) -> None:
        self._plan, self._path = plan, run.folder / LOG

    def row(self, row: Row) -> None:
        match row["kind"]:
            case "start":
                self._append(f"start at step {row['step']} of {self._plan.steps}")
            case "end" | "interrupted":
                self._append(f"{row['kind']} at step {row['step']}")
            case "stop":
                self._append(f"ended by {row['reason']} at step {row['step']}")
            case "failed":
                self._append(f"failed: {row['why']}")
            case "note":
                self._append(row["text"])
            case _:
                pass

    def _append(self, line: str) -> None:
        with disk_faults(Broken, self._path, "cannot be written", INTACT), self._path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(line)}\n")
