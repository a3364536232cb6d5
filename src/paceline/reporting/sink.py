"""Writes the report of a run while it trains, in a thread of its own, so that no fault of a report costs a step."""

from __future__ import annotations

import json
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
from paceline.reporting.shown_run import read_run
from paceline.settings.data import Made
from paceline.settings.read import cut
from paceline.training.opened import run_classes

_IMAGES = 12
_SAMPLE_SIDE = 160
_PATIENCE = 30.0
"""Seconds that the end of a start waits for a page that is being written."""


class ReportSink(Sink):
    """Rewrites report.html after each validation, unless it is still writing it, and always at the end of a start."""

    def __init__(self, plan: Plan, run: Run, _console: Console, data_folder: Path | None = None) -> None:
        self._plan, self._run, self._data_folder = plan, run, data_folder
        self._thread: Thread | None = None
        self._fault: str | None = None
        self._told = False

    def row(self, row: Row) -> None:
        match row["kind"]:
            case "start":
                self._begin(samples=True)
            case "validation" if not self._is_writing():
                self._begin()
            case "end" | "interrupted" | "failed" if self._thread is not None:  # else nothing has begun
                self._finish(self._thread)
            case _:
                pass
        if self._fault is not None and not self._told:
            self._told = True
            self._run.note(f"{REPORT} could not be written: {self._fault}", warning=True)

    def _begin(self, samples: bool = False) -> None:
        self._thread = Thread(target=partial(self._write, samples), name="report", daemon=True)
        self._thread.start()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finish(self, thread: Thread) -> None:
        """Write the page once more, unless what is being written hangs, as on a disk that is away."""
        thread.join(_PATIENCE)
        if not thread.is_alive():
            self._write(samples=False)

    def _write(self, samples: bool) -> None:
        """Write the page; whatever goes wrong is told by the training thread."""
        try:
            folder = self._run.folder
            if samples and not (folder / SEEN).is_file() and not isinstance(self._plan.data, Made):
                write_samples(self._plan, folder, self._data_folder)
            write_report([read_run(folder, self._data_folder)], folder / REPORT, folder / PLOTLY)
        except Exception as fault:  # noqa: BLE001 - a report is never worth a run
            self._fault = cut(f"{type(fault).__name__}: {fault}")


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
