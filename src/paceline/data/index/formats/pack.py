"""Images in Paceline's packs: the index of each part is the table already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.data.index.formats import Found, Unit
from paceline.data.pack import shards
from paceline.errors import DataError

KIND = "pack"
FIRST_LABEL = 0


def recognize(folder: Path) -> bool:
    """Whether this is a pack, finished or not."""
    return (folder / shards.PLAN).is_file() or bool(shards.parts_of(folder))


def units(folder: Path, known: Mapping[str, Unit]) -> list[Unit]:
    """The index of each part."""
    del known
    names = shards.parts_of(folder)
    if not names:
        raise DataError(f"{folder}: this pack is not finished; run the paceline data pack that began it again")
    found = []
    for name in names:
        path = shards.index_file(folder, name)
        status = path.stat()
        found.append(Unit(path.name, name, (status.st_size, status.st_mtime_ns)))
    return found


def scan(folder: Path, unit: Unit) -> Found:
    """Every image of a part, as it was packed."""
    part = shards.read_part(folder, unit.part)
    table = part.table
    return Found(table.rows, table.shards, table.keys, table.objects, part.classes)


def classes(folder: Path) -> tuple[str, ...] | None:
    """The class names of the data set that was packed."""
    return shards.read_part(folder, shards.parts_of(folder)[0]).classes


def notes(_units: Sequence[Unit], _founds: Sequence[Found]) -> tuple[str, ...]:
    """Nothing to say."""
    return ()
