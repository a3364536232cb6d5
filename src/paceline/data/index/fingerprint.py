"""What makes a data set the one that a run began with: its images in their order, their labels and the class names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Table
from paceline.errors import RunError
from paceline.settings.data import Data, Files

IDENTITY = "data.json"
"""The file of a run folder that says so."""


def keep_identity(run: Path, data: Data, folder: Path | None) -> None:
    """Write down what a run begins with; data sets that are published or made have nothing to be mistaken for."""
    if isinstance(data, Files) and folder is not None:
        path, part = run / IDENTITY, run / f".{IDENTITY}"
        try:
            part.write_text(json.dumps(_identity(data, folder), indent=1))
            part.replace(path)
        except OSError as fault:
            raise RunError(f"{path}: cannot be written: {fault.strerror}") from None


def check_identity(run: Path, data: Data, folder: Path | None) -> None:
    """Refuse other data than those that a run began with, in whatever format they are now."""
    if not isinstance(data, Files) or folder is None or not (run / IDENTITY).is_file():
        return
    began, now = json.loads((run / IDENTITY).read_text()), _identity(data, folder)
    for part in ("training", "validation"):
        if began[part] == now[part]:
            continue
        before, after = began[part]["images"], now[part]["images"]
        what = f"{after:,} instead of {before:,}" if before != after else "other names, labels or another order"
        raise RunError(
            f"{folder}: these are not the {part} images that {run} began with: {what}; a run keeps its data: put them "
            f"back as they were, judge these with validate --test {folder}, or train another run on them with "
            f"init.from={run}"
        )


def trained_classes(run: Path) -> tuple[str, ...] | None:
    """The names of the classes that a run on images in files was begun with, in the order of their numbers."""
    path = run / IDENTITY
    return tuple(json.loads(path.read_text())["classes"]) if path.is_file() else None


def _identity(data: Files, folder: Path) -> dict[str, Any]:
    index = open_index(data, folder)
    parts = {part: _split(getattr(index, part)) for part in ("training", "validation")}
    return {"classes": list(index.classes), **parts}


def digest_of(*tables: Table) -> str:
    """Stands for all that tables say of where images are and what they are."""
    texts = [strings for table in tables for strings in (table.keys, table.shards)]
    return _digest(*(table.rows for table in tables), *(part for text in texts for part in (text.ends, text.blob)))


def _split(table: Table) -> dict[str, Any]:
    """How many images, and a digest of their keys and labels in their order, which every format shares."""
    outside = table.rows["flags"] & int(Flag.OTHER_LABEL) > 0  # of these not every format knows the number
    labels = np.where(outside, -1, table.rows["label"]).astype(np.int32)
    return {"images": len(table), "digest": _digest(labels, table.keys.ends, table.keys.blob)}


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
