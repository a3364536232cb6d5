"""paceline predict: says what is in images, by the network of a run."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.command.tables import show_rows
from paceline.data.index.given import GivenImages, find_images
from paceline.errors import DataError, RunError, SpecError
from paceline.evaluating import network_job
from paceline.files import disk_faults, try_writing, write_whole
from paceline.job import flag_words
from paceline.progress import notify, progress_bar
from paceline.record import json_text
from paceline.training.selection import Selection, step_in_words, steps_to_evaluate
from paceline.visible import plural

if TYPE_CHECKING:
    from paceline.prediction import Prediction

BEST = "best"
"""The checkpoint that a trained network is used at, unless another one is asked for."""
_OTHER_FILE = "choose another file with --csv"
_SHOWN = 3
"""How many classes besides the answer a table has room for."""


def run(
    folder: Path, words: list[str], checkpoint: str | None, top: int, threshold: float | None, heatmap: Path | None,
    table: Path | None, device: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Predict every image that the words stand for, and print or write what each shows."""
    if threshold is not None and not 0 <= threshold <= 1:
        raise SpecError(f"--threshold {threshold:g}: expected a probability from 0 to 1, such as --threshold 0.5")
    placed = [word for word in words if word.startswith("on.") and "=" in word]
    images = find_images([word for word in words if word not in placed], iter(sys.stdin))
    placed += flag_words(None, device)
    which = checkpoint or BEST
    plan = network_job(folder, placed, len(images.table) or None).plan
    steps_to_evaluate(folder, Selection(which))  # what is missing is told before torch is loaded
    if table is not None:
        with disk_faults(RunError, table, "cannot be written", _OTHER_FILE):
            try_writing(table)
    if heatmap is not None:
        with disk_faults(RunError, heatmap, "cannot be made", "choose another folder with --heatmap"):
            heatmap.mkdir(parents=True, exist_ok=True)
    skipped = dict(images.unreadable)
    predictions, step = _predict(folder, which, placed, images, skipped, top, heatmap) if images.paths else ([], 0)
    for path, reason in skipped.items():
        notify(f"skipped {path}: {reason}")
    if skipped:
        notify(f"{plural(len(skipped), 'image')} of {len(images.paths) + len(images.unreadable):,} skipped")
    if not predictions:
        raise DataError("none of the images can be read; name JPEG, PNG or other image files")
    if table is not None:
        _write(table, predictions, threshold)
    if as_json:
        rows = [_row(prediction, threshold) for prediction in predictions]
        left_out = [{"image": path, "reason": reason} for path, reason in skipped.items()]
        print(json_text({"run": str(folder), "step": step, "predictions": rows, "skipped": left_out}, indent=1))
    elif table is not None:
        print(f"{plural(len(predictions), 'prediction')} of {step_in_words(folder, step)}, in {table}")
    else:
        where = f"{plan.placement.device} in {plan.placement.precision}"
        print(f"predicted by {step_in_words(folder, step)}, on {where}")
        show_rows([_line(prediction, threshold) for prediction in predictions], as_json=False)
    return 0


def _predict(
    folder: Path, which: str, words: list[str], images: GivenImages, skipped: dict[str, str], top: int,
    heatmap: Path | None,
) -> tuple[list[Prediction], int]:  # fmt: skip
    from paceline.prediction import NO_ANSWER, predict_images
    from paceline.training.opened import open_run

    with progress_bar() as progress:
        opened = open_run(folder, which, words, len(images.table))
        predictions = list(predict_images(opened, images.table, skipped, top, heatmap, progress))
    if not predictions and NO_ANSWER in skipped.values():
        raise RunError(f"{folder}: step {opened.step:,}: {NO_ANSWER}; choose another step with --checkpoint")
    return predictions, opened.step


def _row(prediction: Prediction, threshold: float | None) -> dict[str, Any]:
    """What scripts read."""
    pairs = zip(prediction.classes, prediction.probabilities, strict=True)
    row: dict[str, Any] = {
        "image": prediction.image,
        "answer": prediction.answer(threshold),
        "probability": prediction.probabilities[0],
        "top": [{"class": name, "probability": probability} for name, probability in pairs],
    }
    return row | ({"heatmap": prediction.heatmap} if prediction.heatmap else {})


def _line(prediction: Prediction, threshold: float | None) -> dict[str, Any]:
    """What people read."""
    pairs = list(zip(prediction.classes, prediction.probabilities, strict=True))
    others = pairs[0 if prediction.answer(threshold) is None else 1 : 1 + _SHOWN]
    return {
        "image": prediction.image,
        "answer": prediction.answer(threshold) or "none",
        "probability": f"{prediction.probabilities[0]:.1%}",
        "others": ", ".join(f"{name} {probability:.1%}" for name, probability in others),
    }


def _write(path: Path, predictions: list[Prediction], threshold: float | None) -> None:
    """Write a table: the image, its answer and probability, then each of the most probable classes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ranks = range(1, len(predictions[0].classes) + 1)
    best = [name for rank in ranks for name in (f"class{rank}", f"probability{rank}")]
    writer.writerow(["image", "answer", "probability", *best])
    for each in predictions:
        pairs = [cell for pair in zip(each.classes, each.probabilities, strict=True) for cell in pair]
        writer.writerow([each.image, each.answer(threshold) or "none", each.probabilities[0], *pairs])
    with disk_faults(RunError, path, "cannot be written", _OTHER_FILE):
        write_whole(path, text.getvalue())
