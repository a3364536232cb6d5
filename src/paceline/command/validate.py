"""paceline validate: evaluates checkpoints of a run on its validation images or on others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.command.tables import show_rows
from paceline.data.index.scan import open_index
from paceline.errors import SpecError
from paceline.evaluating import evaluation_job
from paceline.progress import notify
from paceline.record import Row
from paceline.settings.data import Files
from paceline.training.selection import Selection, step_in_words, steps_to_evaluate
from paceline.visible import one_line, plural
from paceline.worker import run_verb

_ROOM = 24
"""Letters of a class's name, of which two fit a line of 80."""


def run(
    folder: Path, words: list[str], selection: Selection, data: Path | None, as_json: bool, details: bool = False
) -> int:
    """Evaluate the newest checkpoint, a chosen one, or all that were not evaluated yet."""
    job = evaluation_job(folder, words, data, selection.test)
    steps_to_evaluate(
        folder, replace(selection, images=job.plan.evaluated_images)
    )  # what is missing is told before torch is loaded
    if selection.test and job.launch is None and isinstance(job.plan.data, Files):
        for note in open_index(job.plan.data, selection.test).notes:
            notify(note)
    which = {"checkpoint": selection.checkpoint, "every": selection.every}
    rows, notes, found = run_verb("validate", job, folder, **which, details=details)
    if job.launch is None or job.launch.rank == 0:
        for note in notes:
            notify(note)
        if as_json:
            show_rows(
                [row | {"details": one} for row, one in zip(rows, found, strict=True)] if details else rows, as_json
            )
        elif rows:
            _show(rows, folder)
            for one in found:
                _show_details(one)
        else:
            print("every checkpoint of this run has been evaluated already")
    return 0


def follow(
    folder: Path, words: list[str], selection: Selection, data: Path | None, as_json: bool, details: bool = False
) -> int:
    """Evaluate every checkpoint of a run once, as they come, until the run has ended."""
    if selection.checkpoint is not None or selection.every or details:
        raise SpecError("--follow evaluates every checkpoint as it comes; leave --checkpoint, --all and --details out")
    job = evaluation_job(folder, words, data, selection.test)
    notes = run_verb("follow", job, folder, as_json=as_json)
    if job.launch is None or job.launch.rank == 0:
        for note in notes:
            notify(note)
    return 0


def _show(rows: list[Row], folder: Path) -> None:
    """What people look for first; the record and --json have all."""
    first = rows[0]
    part = f" a part, {first['images']:,} of {first['of_images']:,} images," if "partial" in first else ""
    images = f" {plural(first['images'], 'image')} of {first['data']}" if "data" in first else part
    which = step_in_words(folder, first["step"]) if len(rows) == 1 else plural(len(rows), "checkpoint")
    print(f"evaluated{images} on {first['device']} in {first['precision']}: {which}")
    columns = ("step", "epoch", "top1", "top5", "loss", "images", "seconds", "images_per_second")
    lines: list[Row] = [{key: row[key] for key in columns} for row in rows]
    if "averaged" in rows[0]:
        for row, line in zip(rows, lines, strict=True):
            line["weights"] = "EMA" if row["averaged"] else "plain"
    show_rows(lines, as_json=False)
    if "majority" in rows[-1]:
        balanced, largest = rows[-1]["balanced_accuracy"], rows[-1]["majority"]
        print(f"unequal classes: balanced accuracy {balanced:.2%}; the largest is {largest:.2%} of the images")


def _show_details(found: Row) -> None:
    """The worst classes and the most confused pairs of classes, and where the rest is."""
    columns = ("class", "images", "precision", "recall", "f1")
    classes = [{key: _short(row[key]) for key in columns} for row in found["classes"]]
    print(f"\nstep {found['step']}: the classes that are found least")
    show_rows(classes, as_json=False)
    if found["pairs"]:
        print("\nconfused most")
        show_rows([{key: _short(value) for key, value in pair.items()} for pair in found["pairs"]], as_json=False)
    print()
    print(one_line(f"all classes, pairs and wrong answers: {found['folder']}"))


def _short(value: Any) -> Any:
    """A class's name as it fits a table of 80 columns; a number that does not exist is a dash."""
    if value is None:
        return "-"
    return value if not isinstance(value, str) or len(value) <= _ROOM else f"{value[: _ROOM - 3]}..."
