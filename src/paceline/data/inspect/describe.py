"""Describes a data set by what its index knows: counts, sizes, encodings and classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.table import Flag, Index, Rows, Table


def describe_data(index: Index) -> dict[str, Any]:
    """Count the images of a data set, and summarize their sizes, encodings and bytes."""
    rows = np.concatenate([index.training.rows, index.validation.rows])
    flags = rows["flags"]
    readable = rows[(flags & Flag.UNREADABLE) == 0]
    return {
        "format": index.kind,
        "folder": str(index.folder),
        "training images": len(index.training),
        "validation images": len(index.validation),
        "classes": len(index.classes),
        "width": _range(readable["width"]),
        "height": _range(readable["height"]),
        "encodings": _encodings(rows),
        "turned by EXIF": int(np.count_nonzero(flags & Flag.TURNED)),
        "with objects": int(np.count_nonzero(rows["objects"])),
        "labels outside the classes": int(np.count_nonzero(flags & Flag.OTHER_LABEL)),
        "bytes": int(rows["length"].sum(dtype=np.int64)),
        "notes": list(index.notes),
    }


def class_sizes(index: Index, table: Table) -> NDArray[np.int64]:
    """How many images of a split each class has."""
    labels = table.rows["label"]
    inside = labels[(labels >= 0) & (labels < len(index.classes))]
    return np.bincount(inside, minlength=len(index.classes)).astype(np.int64)


def _range(lengths: NDArray[Any]) -> dict[str, int] | None:
    """The smallest, the median and the largest of some lengths."""
    if not len(lengths):
        return None
    return {"smallest": int(lengths.min()), "median": int(np.median(lengths)), "largest": int(lengths.max())}


def _encodings(rows: Rows) -> dict[str, int]:
    """How many images have which encoding."""
    flags = rows["flags"]
    jpeg, tiled = (flags & Flag.JPEG) > 0, (flags & Flag.TILED) > 0
    sequential, unreadable = (flags & Flag.SEQUENTIAL) > 0, (flags & Flag.UNREADABLE) > 0
    kinds = {
        "JPEG in tiles": jpeg & tiled,
        "sequential JPEG": jpeg & sequential & ~tiled,
        "progressive JPEG": jpeg & ~sequential & ~tiled,
        "other": ~jpeg & ~unreadable,
        "no image header": unreadable,
    }
    return {kind: int(np.count_nonzero(mask)) for kind, mask in kinds.items()}
