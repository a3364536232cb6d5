"""What an export is asked for, checked before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.data.index.given import find_images
from paceline.data.index.scan import open_index
from paceline.data.index.table import Table
from paceline.data.load.arrays import open_source
from paceline.errors import DataError, RunError, SpecError
from paceline.evaluating import check_validated, network_job
from paceline.files import disk_faults, try_writing
from paceline.job import WHOLE, stored_job
from paceline.numpy_types import Int64s, UInt8s
from paceline.planning import Plan
from paceline.settings.data import Files
from paceline.training.selection import Selection, steps_to_evaluate

ExportKind = Literal["onnx", "pt2", "safetensors", "torchvision"]
FILES: dict[ExportKind, str] = {
    "onnx": "model.onnx",
    "pt2": "model.pt2",
    "safetensors": "model.safetensors",
    "torchvision": "model.pth",
}
"""The file that each kind of export writes."""
SAMPLE = 200
"""Images that an export is compared on, if there are as many."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_CARD = "README.md"


@dataclass(frozen=True)
class ComparedImages:
    """Images to compare an export on."""

    about: str
    """What they are, for people."""
    table: Table | None = None
    """Where they are, if they are in files."""
    folder: Path = Path()
    """What their paths are relative to."""
    pixels: UInt8s | None = None
    """The images themselves [images, side, side, 3], if they are not in files."""
    labels: Int64s | None = None
    """Their classes, if these are known."""


@dataclass(frozen=True)
class ExportRequest:
    """One export of one run."""

    run: Path
    to: ExportKind
    out: Path
    checkpoint: str
    half: bool
    sample: ComparedImages
    plan: Plan
    """Of the run's network, without its data."""


def read_request(
    run: Path, to: str, out: Path | None, checkpoint: str | None, half: bool, images: Sequence[str], data: Path | None
) -> ExportRequest:
    """What an export needs, or a fault where a person can mend what is missing."""
    if to not in FILES:
        raise SpecError(f"--to {to}: expected {', '.join(FILES)}")
    kind: ExportKind = to
    missing = [package for package in _PACKAGES if kind == "onnx" and find_spec(package) is None]
    if missing:
        names = " and ".join(missing)
        are = "is" if len(missing) == 1 else "are"
        raise SpecError(f"--to onnx: {names} {are} not installed; write pip install 'paceline[onnx]'")
    plan = network_job(run, []).plan
    which = checkpoint or "best"
    steps_to_evaluate(run, Selection(which))
    folder = out or run / "exported" / (f"{to}-half" if half else to)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _CARD).is_file())):
        raise RunError(f"{folder}: holds something else than an export; choose another folder with --out")
    with disk_faults(RunError, folder, "cannot be written", "choose another folder with --out"):
        above = next(each for each in (folder, *folder.parents) if each.exists())
        try_writing(above / FILES[kind])
    return ExportRequest(run, kind, folder, which, half, _sample(run, images, data), plan)


def _sample(run: Path, images: Sequence[str], data: Path | None) -> ComparedImages:
    """Images that were named, or validation images of the run, evenly spread over them."""
    if images:
        given = find_images(images, iter(()))
        if not given.paths:
            raise DataError("--images: none of the files can be read")
        return ComparedImages("images that were named", _spread(given.table))
    try:
        job = stored_job(run, ["on.replicas=1", *WHOLE, "on.micro_batch=auto"], data)
    except DataError as fault:
        raise DataError(f"{fault}; or name other images to compare the export on with --images") from None
    check_validated(job, "name images to compare the export on with --images")
    settings = job.plan.data
    if isinstance(settings, Files):
        assert job.data_folder is not None
        table = _spread(open_index(settings, job.data_folder).validation)
        return ComparedImages("validation images", table, job.data_folder, labels=table.rows["label"].astype(np.int64))
    split = open_source(job.plan, job.data_folder).validation
    chosen = _evenly(split.count)
    return ComparedImages("validation images", pixels=split.take(chosen), labels=split.labels_of(chosen))


def _spread(table: Table) -> Table:
    return Table(table.rows[_evenly(len(table))], table.shards, table.keys, table.objects)


def _evenly(count: int) -> Int64s:
    """The indices of some of so many images, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64))
