"""Rows of a record as a run of 60 steps in 6 epochs writes them, for tests that follow one."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.record import RECORD, Row


def start_of(step: int = 0, **values: object) -> Row:
    """A start."""
    return {"kind": "start", "step": step, "steps": 60, "epochs": 6.0, "metric": "top1", **values}


def report_of(step: int, **values: object) -> Row:
    """A report of a run whose steps take two seconds."""
    row = {
        "kind": "report", "step": step, "epoch": step / 10, "lr": 0.1, "loss": 2.0 - step / 60, "top1": step / 100,
        "last_loss": 1.0, "last_top1": 0.5, "bad_steps": 0, "images": 160, "step_seconds": 2.0,
        "images_per_second": 80.0, "waiting": 0.25, "total_seconds": 2.0 * step, "memory": 3 << 30,
    }  # fmt: skip
    return row | values


def validation_of(step: int, top1: float, **values: object) -> Row:
    """A validation."""
    row = {"kind": "validation", "step": step, "epoch": step / 10, "loss": 1 - top1, "top1": top1, "top5": 1.0}
    return row | {"images": 37, "seconds": 1.0, "images_per_second": 37.0} | values


def append(folder: Path, *rows: Row, end: str = "\n") -> None:
    """Write rows to the end of a record."""
    folder.mkdir(exist_ok=True)
    with (folder / RECORD).open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)
