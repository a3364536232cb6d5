"""A split whose images are files, or byte ranges of larger files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paceline.data.index.scan import open_index
from paceline.data.index.table import Table
from paceline.data.load.cache import Cache
from paceline.errors import DataError, ReadFailed
from paceline.files import read_exactly
from paceline.numpy_types import Int64s
from paceline.planning import Plan
from paceline.settings.data import Files

PAUSES = (0.1, 0.3, 1.0, 3.0, 9.0)
"""Seconds between attempts to read."""


class ImageFiles:
    """A split whose images are byte ranges of files."""

    def __init__(self, table: Table, folder: Path, split: str, cache: Cache | None = None) -> None:
        self.table, self.split, self.count = table, split, len(table.rows)
        self.folder, self.cache = folder, cache or Cache(0)
        self._failed = threading.Event()

    def labels_of(self, indices: Int64s) -> Int64s:
        """The labels of images."""
        return self.table.rows["label"][indices].astype(np.int64)

    def read(self, index: int) -> bytes:
        """An image's bytes; a read that fails is tried again, and in the end aborts the run."""
        encoded = self.cache.get(self.split, index)
        if encoded is not None:
            return encoded
        attempts = 0
        while True:
            try:
                return self.cache.put(self.split, index, self._read(index))
            except OSError as fault:
                attempts += 1
                # Once one image has used up its attempts, those ahead of it need not wait for theirs.
                if attempts <= len(PAUSES) and not self._failed.wait(PAUSES[attempts - 1]):
                    continue
                self._failed.set()
                raise ReadFailed(
                    f"{self.table.name(index)}: cannot be read ({fault.strerror or fault}; {attempts} attempts); "
                    "go on with paceline resume when it can"
                ) from None

    def _read(self, index: int) -> bytes:
        name, offset, length = self.table.span(index)
        path = self.folder / name
        if offset == 0 and path.stat().st_size > length:  # a file of its own that was overwritten
            raise DataError(
                f"{path}: has more than {length:,} bytes, so it has changed since it was indexed; touch its folder to "
                "have it indexed again"
            )
        return read_exactly(path, offset, length)

    def after(self, index: int) -> Iterator[int]:
        """The images that follow one, wrapping around, each once: where a replacement is searched for."""
        for step in range(1, self.count):
            yield (index + step) % self.count


def open_splits(plan: Plan, data: Files, folder: Path) -> tuple[ImageFiles, ImageFiles]:
    """The training and the validation images of a data set."""
    index = open_index(data, folder)
    cache = Cache(plan.placement.cache, (len(index.training), len(index.validation)))
    return (
        ImageFiles(index.training, folder, "training", cache),
        ImageFiles(index.validation, folder, "validation", cache),
    )
