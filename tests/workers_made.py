"""What tests have worker processes decode with, to see what those read and scan."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.data.index import scan
from paceline.data.index.formats import ScanUnit, UnitImages
from paceline.data.index.formats import folder as folders
from paceline.data.load.cache import Cache
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.data.load.workers import Chunk, Faults, Fill
from paceline.errors import DataError
from paceline.numpy_types import UInt8s
from paceline.planning import Plan
from paceline.settings.data import Files

PATIENCE = 120
"""Seconds after which another worker will not come any more."""


class Counting(ImageFiles):
    """A split that counts the images that are read from files."""

    reads = 0

    def _read(self, number: int) -> bytes:
        Counting.reads += 1
        return super()._read(number)


def failing() -> Fill:
    """Cannot begin."""
    raise DataError("the disk is gone")


def meeting(plan: Plan, folder: Path, meet: Path, cache: Cache) -> Fill:
    """Reads images through a cache, says how many of them came from files, and which process this is.

    Those that want mirrored images wait until another worker does too.
    """
    assert isinstance(plan.data, Files)
    opened = open_splits(plan, plan.data, folder)
    splits = {split.split: Counting(split.table, folder, split.split, cache) for split in opened}

    def fill(chunk: Chunk, into: UInt8s) -> Faults:
        if chunk.flipped.any():
            (meet / str(os.getpid())).touch()
            late = time.monotonic() + PATIENCE
            while len(list(meet.iterdir())) < 2:
                assert time.monotonic() < late
                time.sleep(0.01)
        before = Counting.reads
        for number, place in zip(chunk.indices.tolist(), into, strict=True):
            place[:] = sum(splits[chunk.split].read(number)) % 251
        return [(Counting.reads - before, str(os.getpid()))]

    return fill


def scanning(plan: Plan, folder: Path, temporary: str, environment: Mapping[str, str]) -> Fill:
    """Opens the data where this environment is, and says how many folders that scanned."""
    assert isinstance(plan.data, Files)
    os.environ.update(environment)
    tempfile.tempdir = temporary
    scanned, real = [], folders.scan

    def counted(place: Path, unit: ScanUnit) -> UnitImages:
        scanned.append(unit.name)
        return real(place, unit)

    setattr(folders, "scan", counted)  # noqa: B010 - mypy takes a module's function for a constant
    found = scan.open_index(plan.data, folder)
    return lambda chunk, into: [(len(scanned), str(len(found.training)))]
