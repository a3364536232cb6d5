"""Images in Paceline's packs: the index of each split is a table already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.data.index.formats import ScanUnit, UnitImages
from paceline.data.pack import shards
from paceline.errors import DataError
from paceline.files import disk_faults

KIND = "pack"
FIRST_LABEL = 0


def recognize(folder: Path) -> bool:
    """Whether this is a pack, finished or not."""
    with disk_faults(DataError, folder, "cannot be read"):
        return (folder / shards.PLAN).is_file() or bool(shards.packed_splits(folder))


def units(folder: Path, _before: Mapping[str, ScanUnit]) -> list[ScanUnit]:
    """The index file of each split."""
    splits = shards.packed_splits(folder)
    if not splits:
        raise DataError(f"{folder}: this pack is not finished; run the paceline data pack that began it again")
    paths = [(split, shards.index_path(folder, split)) for split in splits]
    return [ScanUnit(path.name, split, (path.stat().st_size, path.stat().st_mtime_ns)) for split, path in paths]


def scan(folder: Path, unit: ScanUnit) -> UnitImages:
    """Find every image of a split, as it was packed."""
    packed = shards.read_split(folder, unit.split)
    table = packed.table
    return UnitImages(table.rows, table.shards, table.keys, table.objects, packed.classes)


def classes(folder: Path) -> tuple[str, ...] | None:
    """The class names of the data set that was packed."""
    return shards.read_split(folder, shards.packed_splits(folder)[0]).classes


def notes(_units: Sequence[ScanUnit], _images: Sequence[UnitImages]) -> tuple[str, ...]:
    """Packs need no notes."""
    return ()
