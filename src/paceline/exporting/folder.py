"""Exports a trained network into a folder: the file, what prepares its images, and a model card."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.exporting import preprocess
from paceline.exporting.card import model_card
from paceline.exporting.comparison import Comparison, compare, sample_batches
from paceline.exporting.request import FILES, ExportRequest
from paceline.exporting.torchvision_names import twin
from paceline.exporting.writers import write_model
from paceline.files import disk_faults, write_whole
from paceline.progress import Progress, silent
from paceline.record import json_text
from paceline.settings.data import Center
from paceline.training.opened import REFERENCE, OpenedRun, open_run

_STAGES = 3
"""Opening the run, writing the network, and comparing it."""


@dataclass(frozen=True)
class Exported:
    """What an export has written, and how it compares."""

    folder: Path
    file: Path
    step: int
    comparison: Comparison


def export_run(request: ExportRequest, allow_difference: bool = False, progress: Progress = silent) -> Exported:
    """Write a network, run it on real images, and move it into place if it answers as the run's own network does."""
    progress("exporting", 0, _STAGES)
    sample = request.sample
    images = None if sample.table is None else len(sample.table)
    opened = open_run(request.run, request.checkpoint, REFERENCE, images)
    described = _described(request, opened)
    batches, labels = sample_batches(opened, sample)
    with disk_faults(RunError, request.out, "cannot be written", "choose another folder with --out"):
        request.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=request.out) as scratch:
            file = Path(scratch, FILES[request.to])
            progress("exporting", 1, _STAGES)
            classifier, recipe = opened.classifier(), opened.plan.recipe
            scores, by = write_model(request.to, classifier, recipe, opened.side, described, file, request.half)
            progress("exporting", 2, _STAGES)
            result = compare(opened, batches, labels, scores, by)
            if not result.agrees and not allow_difference:
                raise RunError(_too_different(request, result))
            place = file.replace(request.out / file.name)
        write_whole(
            request.out / "preprocess.json",
            json_text(described["preprocess"] | {"classes": described["classes"]}, indent=1),
        )
        write_whole(request.out / "preprocess.py", Path(preprocess.__file__).read_bytes())
        write_whole(request.out / "README.md", model_card(request, opened, result, described))
    return Exported(request.out, place, opened.step, result)


def _described(request: ExportRequest, opened: OpenedRun) -> dict[str, Any]:
    """What a file says of itself: its classes, what prepares its images, and where it comes from."""
    described: dict[str, Any] = {
        "classes": list(opened.classes),
        "preprocess": preprocess_settings(opened),
        "run": {"model": opened.plan.recipe.model.name, "step": opened.step},
    }
    return described | ({"twin": twin(opened.plan.recipe)} if request.to == "torchvision" else {})


def preprocess_settings(opened: OpenedRun) -> dict[str, Any]:
    """The numbers of preprocess.json."""
    data = opened.files
    center = isinstance(data.evaluation, Center)
    return {
        "side": opened.side,
        "resize": data.resize,
        "orientation": data.orientation,
        "short": data.evaluation.shorter(opened.side) if isinstance(data.evaluation, Center) else None,
        "fraction": None if center else getattr(data.evaluation, "fraction", None),
        "normalize": data.normalize,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def _too_different(request: ExportRequest, result: Comparison) -> str:
    less = "leave --half out, or " if request.half else ""
    return (
        f"{request.out}: only {result.equal:,} of {result.images:,} answers are those of the run's own network (the "
        f"largest difference of a score is {result.difference:.2g}), so nothing was exported; {less}accept it with "
        "--allow-difference"
    )
