"""What a validation got right and wrong, class by class and image by image: CSV tables in the run folder."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline import checkpoint
from paceline.errors import Broken
from paceline.files import disk_faults, write_whole
from paceline.model.hardest import HardImage
from paceline.record import INTACT, Row, Run
from paceline.training.answers import CLASS_COLUMNS, CLASSES, CONFUSION, HARD, IMAGE_COLUMNS
from paceline.training.evaluate import Evaluation
from paceline.training.opened import run_classes
from paceline.training.session import Session

_SHOWN = 10
"""Classes and pairs of classes that people are shown."""


def details_folder(run: Run, kind: str, step: int) -> Path:
    """Where the tables of a validation or a test after a step are."""
    return run.folder / kind / checkpoint.name_of(step)


def write_details(session: Session, folder: Path, evaluation: Evaluation, name: str = HARD) -> None:
    """Write the tables of a validation; `name` is that of the images, and wrong.csv holds only wrong answers."""
    if not session.run.writes:
        return
    names = run_classes(session.run.folder, session.plan.data)
    images = [one for one in evaluation.hardest if name == HARD or one.answer != one.truth]
    with disk_faults(Broken, folder, "cannot be written", INTACT):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / CLASSES, _class_lines(evaluation, names))
        if evaluation.counts.confusion is not None:
            rows = zip(names, evaluation.counts.confusion.tolist(), strict=True)
            _write(folder / CONFUSION, [["truth", *names], *([truth, *row] for truth, row in rows)])
        _write(folder / name, _image_lines(images, names, session))


def worst(session: Session, evaluation: Evaluation) -> Row:
    """The classes that are found least, and the pairs of classes that are confused most, for people."""
    names = run_classes(session.run.folder, session.plan.data)
    classes = [dict(zip(CLASS_COLUMNS, line, strict=True)) for line in _class_cells(evaluation, names)]
    found = sorted((row for row in classes if row["images"]), key=lambda row: (row["recall"], -row["images"]))
    wrong = Counter((one.truth, one.answer) for one in evaluation.hardest if one.truth != one.answer)
    pairs = sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))[:_SHOWN]
    return {
        "classes": found[:_SHOWN],
        "pairs": [
            {
                "truth": names[truth],
                "answer": names[answer],
                "images": count,
                "of": int(evaluation.counts.support[truth]),
            }
            for (truth, answer), count in pairs
        ],
    }


def _class_cells(evaluation: Evaluation, names: Sequence[str]) -> Iterable[list[Any]]:
    """What is known of each class; None where nothing can be divided by."""
    counts = evaluation.counts
    columns = [counts.support, counts.answered, counts.right, counts.precision, counts.recall, counts.f1]
    for name, *numbers in zip(names, *(column.tolist() for column in columns), strict=True):
        yield [name, *(None if math.isnan(number) else number for number in numbers)]


def _class_lines(evaluation: Evaluation, names: Sequence[str]) -> Iterable[list[Any]]:
    yield list(CLASS_COLUMNS)
    yield from _class_cells(evaluation, names)


def _image_lines(images: Sequence[HardImage], names: Sequence[str], session: Session) -> Iterable[list[Any]]:
    yield list(IMAGE_COLUMNS)
    for one in images:
        path = session.loader.validation_name(one.image)
        yield [path, names[one.truth], names[one.answer], one.truth_probability, one.probability, one.loss]


def _write(path: Path, lines: Iterable[list[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_whole(path, text.getvalue().encode(errors="surrogateescape"))  # names that are no text stay as they are
