"""Writes the report of a run, and its picture, while it trains: in a thread, so that no fault of them costs a step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread

from PIL import Image
from rich.console import Console

from paceline.data.inspect.samples import draw_samples
from paceline.files import write_whole
from paceline.planning import Plan
from paceline.record import REPORT, Row, Run, Sink
from paceline.reporting.page import PLOTLY, SEEN, write_report
from paceline.reporting.pictures import picture
from paceline.reporting.results import RESULTS, write_results
from paceline.reporting.shown_run import read_run
from paceline.settings.data import Made
from paceline.settings.read import cut
from paceline.training.opened import run_classes

_IMAGES = 12
_SAMPLE_SIDE = 160
_PATIENCE = 30.0
"""Seconds that the end of a start waits for a page that is being written."""


_REST = 100.0
"""What takes some time is not done again before so many times as much has passed: threads share Python's lock."""


_SHORT = 30.0
"""Seconds before which no picture is drawn but at the end: only to import what draws takes a good part of one."""


class _Pace:
    """Says when something may be done again, by how long it took the last time."""

    def __init__(self, first: float = 0.0) -> None:
        """It may be done for the first time in so many seconds."""
        self._due_at = time.monotonic() + first

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What happens inside is what is done."""
        start = time.monotonic()
        yield
        now = time.monotonic()
        self._due_at = now + _REST * (now - start)


class ReportSink(Sink):
    """Rewrites report.html and results.png after validations, each for a hundredth of the time at most, and always at
    the end of a start."""

    def __init__(self, plan: Plan, run: Run, _console: Console, data_folder: Path | None = None) -> None:
        self._plan, self._run, self._data_folder = plan, run, data_folder
        self._thread: Thread | None = None
        self._page, self._picture = _Pace(), _Pace(_SHORT)
        self._fault: str | None = None
        self._told = False

    def row(self, row: Row) -> None:
        match row["kind"]:
            case "start":
                self._begin(samples=True)
            case "validation" if not self._is_writing() and self._page.is_due():
                self._begin()
            case "end" | "interrupted" | "failed" if self._thread is not None:  # else nothing has begun
                self._finish(self._thread)
            case _:
                pass
        if self._fault is not None and not self._told:
            self._told = True
            self._run.note(self._fault, warning=True)

    def _begin(self, samples: bool = False) -> None:
        self._thread = Thread(target=partial(self._write, samples), name="report", daemon=True)
        self._thread.start()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finish(self, thread: Thread) -> None:
        """Write the page once more, unless what is being written hangs, as on a disk that is away."""
        thread.join(_PATIENCE)
        if not thread.is_alive():
            self._write(last=True)

    def _write(self, samples: bool = False, last: bool = False) -> None:
        """Write the page and the picture; whatever goes wrong is told by the training thread."""
        folder, name = self._run.folder, REPORT
        try:
            if samples and not (folder / SEEN).is_file() and not isinstance(self._plan.data, Made):
                write_samples(self._plan, folder, self._data_folder)
            with nullcontext() if samples else self._page.timed():  # the first page has much to import
                run = read_run(folder, self._data_folder)
                write_report([run], folder / REPORT, folder / PLOTLY)
            name = RESULTS
            if last or self._picture.is_due():
                with self._picture.timed():
                    write_results(run, folder / RESULTS)
        except Exception as fault:  # noqa: BLE001 - a report is never worth a run
            self._fault = cut(f"{name} could not be written: {type(fault).__name__}: {fault}")


def write_samples(plan: Plan, folder: Path, data_folder: Path | None) -> None:
    """Draw what the network sees of a few training images into the run folder."""
    names = run_classes(folder, plan.data)
    samples = [
        {
            "class": names[sample.label] if 0 <= sample.label < len(names) else "?",
            "shown": [picture(Image.fromarray(pixels.squeeze()), _SAMPLE_SIDE) for pixels in sample.shown],
        }
        for sample in draw_samples(plan, data_folder, _IMAGES)
    ]
    write_whole(folder / SEEN, json.dumps({"samples": samples}))
