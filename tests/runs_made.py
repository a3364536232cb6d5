"""Run folders as a training would leave them, written in a moment, for tests of what only reads them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import SMALL, make_plan
from paceline import checkpoint
from paceline.record import RECORD, Row, store_plan
from paceline.settings.placement import Placement
from paceline.settings.read import Tree
from paceline.training.answers import CLASS_COLUMNS, CLASSES, CONFUSION, HARD, IMAGE_COLUMNS

START: Row = {
    "kind": "start", "step": 0, "time": 1.7e9, "command": ["train", "page.yaml", "--out", "runs/x", "seed=1"],
    "placement": {"device": "cpu", "replicas": 1, "precision": "fp32", "micro_batch": 16}, "arithmetic_changed": {},
    "machine": {"cores": 2, "memory": 8 << 30, "accelerators": 0, "host": "here", "processor": "p", "system": "s"},
    "versions": {"paceline": "0", "torch": "2"}, "commit": "abc", "parameters": 75290,
}  # fmt: skip
STEP = 6
"""The step of the last validation of a run that is written here."""


def report_row(step: int, **values: Any) -> Row:
    """A report as the record has it."""
    numbers = {"lr": 0.1, "loss": 2.0 / step, "last_loss": 1.0, "top1": 0.1 * step, "last_top1": 0.1, "bad_steps": 0}
    times = {"step_seconds": 0.1, "images_per_second": 100.0 + step, "waiting": 0.01, "total_seconds": 1.0 * step}
    return {"kind": "report", "step": step, "epoch": step / 6, **numbers, **times, **values}


def validation_of(step: int, top1: float, **values: Any) -> Row:
    """A validation as the record has it."""
    numbers = {"loss": 1.5, "top1": top1, "top5": 0.9, "images": 40, "seconds": 1.0, "images_per_second": 40.0}
    return {"kind": "validation", "step": step, "epoch": step / 6, **numbers, **values}


def write_run(folder: Path, *words: str, top1: float = 0.5, rows: Sequence[Row] | None = None, text: str = SMALL,
              data: Path | None = None) -> Path:  # fmt: skip
    """A run folder with plan.yaml and a record."""
    plan = make_plan(*words, text=text)
    folder.mkdir(parents=True)
    store_plan(folder, plan, Placement(), data, Tree(), Tree())
    made = [START, *map(report_row, range(1, STEP + 1)), validation_of(3, top1 / 2), validation_of(STEP, top1)]
    made.append({"kind": "end", "step": STEP, "images_per_second": 123.0})
    lines = [json.dumps(row) for row in (made if rows is None else rows)]
    (folder / RECORD).write_text("\n".join(lines) + "\n")
    return folder


def write_answers(
    folder: Path, names: Sequence[str], confusion: Sequence[Sequence[int]], images: Sequence[Sequence[Any]] = ()
) -> None:
    """The tables of the last validation: `images` are path, truth, answer, two probabilities and the loss."""
    place = folder / "validation" / checkpoint.name_of(STEP)
    place.mkdir(parents=True)
    classes = []
    for number, (name, row) in enumerate(zip(names, confusion, strict=True)):
        answered = sum(line[number] for line in confusion)
        classes.append([name, sum(row), answered, row[number], 0.5, row[number] / max(1, sum(row)), 0.5])
    tables: dict[str, list[Sequence[Any]]] = {
        CLASSES: [CLASS_COLUMNS, *classes],
        CONFUSION: [["truth", *names], *([name, *row] for name, row in zip(names, confusion, strict=True))],
        HARD: [IMAGE_COLUMNS, *images],
    }
    for name, lines in tables.items():
        with (place / name).open("w", newline="", errors="surrogateescape") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
