"""training.csv and validation.csv, with the columns that scripts for the older TensorFlow system read."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import Broken
from paceline.files import disk_faults
from paceline.planning import Plan
from paceline.record import INTACT, Row, Run, Sink, latest

TRAINING = {
    "step": "step",
    "iteration": "step",
    "epoch": "epoch",
    "lr": "lr",
    "loss_batch": "last_loss",
    "loss_avg": "loss",
    "train_acc_batch": "last_top1",
    "train_acc_avg": "top1",
    "it_time": "step_seconds",
    "img_per_sec": "images_per_second",
    "total_time": "total_seconds",
}
"""Each column and the field of a row that it shows; accuracies are in percent."""

VALIDATION = {
    "name": "name",
    "iteration": "step",
    "epoch": "epoch",
    "val_acc": "top1",
    "val_time": "seconds",
    "val_size": "images",
    "img_per_sec": "images_per_second",
    "latency": "latency",
    "val_loss": "loss",
    "val_acc5": "top5",
}
TABLES = {"report": ("training", TRAINING), "validation": ("validation", VALIDATION)}
_PERCENT = {"last_top1", "top1", "top5"}


class CsvSink(Sink):
    """Two tables beside the record. Each start writes them anew, so that a resumed run has every row once; so does a
    row from beside the training, unless somebody trains."""

    def __init__(self, _plan: Plan, run: Run, _console: Console) -> None:
        self._run, self._folder = run, run.folder

    def row(self, row: Row) -> None:
        if row["kind"] == "start":
            write_tables(self._folder, [old for old in self._run.rows() if old.get("step", 0) <= row["step"]])
        elif row["kind"] in TABLES:
            name, columns = TABLES[row["kind"]]
            path = self._folder / f"{name}.csv"
            if self._run.mode == "append" and (self._run.try_own() or not path.is_file()):
                write_tables(self._folder, self._run.rows())
                self._run.close()
            else:
                _write(path, "a", [_cells(self._folder, columns, row)])


def write_tables(folder: Path, rows: list[Row]) -> None:
    """Both tables of a run, from the rows of its record."""
    for kind, (name, columns) in TABLES.items():
        cells = [_cells(folder, columns, row) for row in latest(rows, kind)]
        _write(folder / f"{name}.csv", "w", [list(columns), *cells])


def _cells(folder: Path, columns: dict[str, str], row: Row) -> list[Any]:
    fields = {"name": folder.name, "latency": -1, **row}
    return [100 * fields[key] if key in _PERCENT else fields[key] for key in columns.values()]


def _write(path: Path, mode: str, lines: list[list[Any]]) -> None:
    with disk_faults(Broken, path, "cannot be written", INTACT), path.open(mode, newline="") as file:
        csv.writer(file).writerows(lines)
