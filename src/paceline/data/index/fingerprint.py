"""The fingerprint of a data set: proves that a resumed run sees the images, labels and classes that it began with."""

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
from paceline.files import disk_faults, read_whole, write_whole
from paceline.settings.data import Data, Files

FINGERPRINT = "data.json"
"""The file in a run folder that holds the fingerprint."""
_SPLITS = ("training", "validation")


def write_fingerprint(run: Path, data: Data, folder: Path | None) -> None:
    """Write the fingerprint of a run's data into its folder; published and drawn data sets need none."""
    if isinstance(data, Files) and folder is not None:
        path = run / FINGERPRINT
        with disk_faults(RunError, path, "cannot be written"):
            write_whole(path, json.dumps(_fingerprint(data, folder), indent=1))


def check_fingerprint(run: Path, data: Data, folder: Path | None) -> None:
    """Refuse data other than those that a run began with; their format may have changed."""
    if not isinstance(data, Files) or folder is None or (began := _stored(run)) is None:
        return
    now = _fingerprint(data, folder)
    for split in _SPLITS:
        if began[split] == now[split]:
            continue
        before, after = began[split]["images"], now[split]["images"]
        change = f"{after:,} instead of {before:,}" if before != after else "other names, labels or another order"
        raise RunError(
            f"{folder}: these are not the {split} images that {run} began with: {change}; a run keeps its data: put "
            f"them back as they were, evaluate these with validate --test {folder}, or train another run on them with "
            f"init.from={run}"
        )


def trained_classes(run: Path) -> tuple[str, ...] | None:
    """The names of the classes that a run on images in files was trained for, in the order of their numbers."""
    began = _stored(run)
    return tuple(began["classes"]) if began is not None else None


def training_digest(run: Path) -> str | None:
    """The digest of the training images of a run on images in files."""
    began = _stored(run)
    return str(began["training"]["digest"]) if began is not None else None


def data_digest(data: Data, folder: Path | None) -> str:
    """A digest of the images, labels and classes of a data set in files; the name of any other."""
    if not isinstance(data, Files) or folder is None:
        return data.name
    return _digest(np.frombuffer(json.dumps(_fingerprint(data, folder)).encode(), np.uint8))


def _stored(run: Path) -> dict[str, Any] | None:
    """The fingerprint in a run folder, if there is one."""
    path = run / FINGERPRINT
    with disk_faults(RunError, path, "cannot be read"):
        try:
            content = read_whole(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        began = json.loads(content)
        assert all(isinstance(name, str) for name in began["classes"])
        assert all(isinstance(began[split]["images"], int) and began[split]["digest"] for split in _SPLITS)
    except (ValueError, LookupError, TypeError, AssertionError, RecursionError):
        raise RunError(
            f"{path}: is damaged, so nobody knows what data this run began with; put it back as it was"
        ) from None
    return dict(began)


def _fingerprint(data: Files, folder: Path) -> dict[str, Any]:
    index = open_index(data, folder)
    splits = {"training": _split_digest(index.training), "validation": _split_digest(index.validation)}
    return {"classes": list(index.classes), **splits}


def digest_of(*tables: Table) -> str:
    """A digest of everything that tables hold."""
    texts = [strings for table in tables for strings in (table.keys, table.shards)]
    return _digest(*(table.rows for table in tables), *(array for text in texts for array in (text.ends, text.blob)))


def _split_digest(table: Table) -> dict[str, Any]:
    """The number of images, and a digest of their keys and labels in order, which is the same in every format."""
    outside = table.rows["flags"] & int(Flag.OTHER_LABEL) > 0  # not every format knows the numbers of these
    labels = np.where(outside, -1, table.rows["label"]).astype(np.int32)
    return {"images": len(table), "digest": _digest(labels, table.keys.ends, table.keys.blob)}


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
