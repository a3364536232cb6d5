"""training.csv and validation.csv, with the columns that scripts for the older TensorFlow system read."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from paceline.errors import Broken
from paceline.record import Row, latest
from paceline.sink import Sink

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
"""Column and the record's word for it; accuracies are in percent."""

VALIDATION = {
    "name": "name",
    "iteration": "step",
    "epoch": "epoch",
    "val_acc": "top1",
    "val_time": "seconds",
    "val_size": "images",
    "img_per_sec": "images_per_second",
    "latency": "latency",
}
_PERCENT = {"last_top1", "top1"}


class Csv(Sink):
    """Two tables beside the record, written anew from it at each start, so that a resumed run has each row once."""

    def __init__(self, folder: Path, rows: list[Row], step: int) -> None:
        self._folder = folder
        for name, columns, kind in (("training", TRAINING, "report"), ("validation", VALIDATION, "validation")):
            old = [row for row in latest(rows, kind) if row["step"] <= step]
            self._write(name, "w", [list(columns), *(self._cells(columns, row) for row in old)])

    def report(self, row: Row) -> None:
        self._write("training", "a", [self._cells(TRAINING, row)])

    def validation(self, row: Row) -> None:
        self._write("validation", "a", [self._cells(VALIDATION, row)])

    def _cells(self, columns: dict[str, str], row: Row) -> list[Any]:
        full = {"name": self._folder.name, "latency": -1, **row}
        return [100 * full[word] if word in _PERCENT else full[word] for word in columns.values()]

    def _write(self, name: str, mode: str, lines: list[list[Any]]) -> None:
        path = self._folder / f"{name}.csv"
        try:
            with path.open(mode, newline="") as file:
                csv.writer(file).writerows(lines)
        except OSError as fault:
            raise Broken(f"{path}: cannot be written: {fault.strerror}; what was saved is whole") from None
