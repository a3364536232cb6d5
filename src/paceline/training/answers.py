"""The tables that a validation leaves of its answers: their names and columns, and how they are read back."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from paceline import checkpoint
from paceline.files import read_whole

CLASSES, CONFUSION, HARD, WRONG = "classes.csv", "confusion.csv", "hardest.csv", "wrong.csv"
CLASS_COLUMNS = ("class", "images", "answered", "right", "precision", "recall", "f1")
IMAGE_COLUMNS = ("path", "truth", "answer", "truth_probability", "answer_probability", "loss")


def read_lines(folder: Path, step: int, name: str) -> list[list[str]]:
    """The lines of a table that the validation after a step has left in a run folder, its header first; none if it
    cannot be read."""
    try:
        content = read_whole(folder / "validation" / checkpoint.name_of(step) / name)
        return list(csv.reader(io.StringIO(content.decode(errors="surrogateescape"), newline="")))
    except (OSError, csv.Error):
        return []


def read_table(folder: Path, step: int, name: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The same as one dict a line, of tables that have these columns; a line that is not whole is passed over."""
    lines = read_lines(folder, step, name)
    if not lines or tuple(lines[0]) != columns:
        return []
    return [dict(zip(columns, line, strict=True)) for line in lines[1:] if len(line) == len(columns)]


def read_classes(folder: Path, step: int) -> list[dict[str, str]]:
    """The table of classes that the validation after a step has left in a run folder, if it has."""
    return read_table(folder, step, CLASSES, CLASS_COLUMNS)
