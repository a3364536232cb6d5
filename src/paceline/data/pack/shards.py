"""Packs: shards with images behind one another, and an index of fixed-width rows that says what and where each is."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.index import file
from paceline.data.index.table import ROW, Rows, Strings, Table
from paceline.errors import DataError

VERSION = 1
"""Goes up when older versions of Paceline would read a pack wrongly."""
PLAN = "paceline-pack.json"
"""The file by which a pack, finished or not, is known, and which says of what it is made."""
Name = Literal["training", "validation", "all"]
PARTS: tuple[Name, ...] = ("training", "validation", "all")
"""The parts that a pack may have; `all` is data without a validation part."""

Tell = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and how much there is."""
Checks = NDArray[np.uint32]

_HEAD = b"paceline pack %03d\n"


@dataclass(frozen=True)
class Packed:
    """One part of a pack: its images, and the CRC-32 of each one's bytes."""

    name: str
    classes: tuple[str, ...]
    table: Table
    checks: Checks


def index_file(folder: Path, part: str) -> Path:
    """Where the index of a part is."""
    return folder / f"{part}.index"


def shard_name(part: str, number: int) -> str:
    """The file of one shard."""
    return f"{part}-{number:05}.pack"


def parts_of(folder: Path) -> list[Name]:
    """The parts that a folder holds; none where it is no pack, or one that is not finished."""
    return [part for part in PARTS if index_file(folder, part).is_file()]


def write_part(folder: Path, part: Packed) -> None:
    """Write the index of a part, whole or not at all."""
    file.write(index_file(folder, part.name), _facts(part), _arrays(part))


def is_written(folder: Path, part: Packed) -> bool:
    """Whether exactly this index is there, so that nobody need scan it again."""
    stored = file.read(index_file(folder, part.name))
    return stored is not None and stored.facts == _facts(part) == _facts(part, stored.arrays)


def _arrays(part: Packed) -> file.Arrays:
    table = part.table
    return {
        "rows": table.rows,
        "checks": part.checks,
        "keys": table.keys.blob,
        "key_ends": table.keys.ends,
        "shards": table.shards.blob,
        "shard_ends": table.shards.ends,
        "objects": table.objects,
    }


def _facts(part: Packed, arrays: file.Arrays | None = None) -> dict[str, Any]:
    """What an index begins with, the last of it a checksum of everything."""
    said = {"pack": VERSION, "part": part.name, "classes": [*part.classes]}
    return said | {"check": _check(said, _arrays(part) if arrays is None else arrays)}


def read_part(folder: Path, name: str) -> Packed:
    """The index of a part, mapped into memory and checked."""
    path = index_file(folder, name)
    stored = file.read(path)
    if stored is None or "pack" not in stored.facts:
        raise DataError(f"{path}: this index of a pack is cut or damaged; pack the same images again to mend it")
    facts, arrays = stored.facts, stored.arrays
    if facts["pack"] != VERSION:
        raise DataError(f"{path}: a pack of version {facts['pack']}, this Paceline reads {VERSION}; update Paceline")
    said = {name: value for name, value in facts.items() if name != "check"}
    if _check(said, arrays) != facts["check"] or arrays["rows"].dtype != ROW:
        raise DataError(f"{path}: its checksum is wrong; copy it, or pack the same images, again")
    keys, shards = Strings(arrays["keys"], arrays["key_ends"]), Strings(arrays["shards"], arrays["shard_ends"])
    table = Table(arrays["rows"], shards, keys, arrays["objects"])
    return Packed(facts["part"], tuple(facts["classes"]), table, arrays["checks"])


def _check(said: dict[str, Any], arrays: file.Arrays) -> int:
    check = zlib.crc32(json.dumps(said).encode())
    for array in arrays.values():
        check = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b"", check)
    return check


class Shard:
    """A shard that is being written; it gets its name, and its rows beside it, when it is complete and on disk."""

    def __init__(self, folder: Path, part: str, number: int) -> None:
        self.path = folder / shard_name(part, number)
        self._begun = self.path.with_suffix(".begun")
        self._file = self._begun.open("wb")
        self._file.write(_HEAD % VERSION)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._begun.unlink(missing_ok=True)

    def add(self, encoded: bytes) -> tuple[int, int]:
        """Append an image: where it begins, and its CRC-32."""
        place = self._file.tell()
        self._file.write(encoded)
        return place, zlib.crc32(encoded)

    def finish(self, rows: Rows, checks: Checks) -> None:
        """Make the shard count as complete."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._begun.replace(self.path)
        file.write(_rows_file(self.path), {"pack": VERSION, "bytes": size}, {"rows": rows, "checks": checks})


def _rows_file(shard: Path) -> Path:
    return shard.with_suffix(".rows")


def finished_shard(folder: Path, part: str, number: int, images: int) -> tuple[Rows, Checks] | None:
    """The rows and checks of a shard that is complete; None where it must be written again."""
    path = folder / shard_name(part, number)
    stored = file.read(_rows_file(path))
    if stored is None or stored.facts.get("pack") != VERSION or len(stored.arrays["rows"]) != images:
        return None
    if not path.is_file() or path.stat().st_size != stored.facts["bytes"]:
        return None
    return stored.arrays["rows"], stored.arrays["checks"]


def verify(folder: Path, tell: Tell | None = None, threads: int = 4) -> int:
    """Read every image of a pack and compare its checksum; the number of images, or a DataError that says where."""
    names = parts_of(folder)
    if not names:
        raise DataError(f"{folder}: there is no finished pack here; write one with paceline data pack SOURCE {folder}")
    parts = [read_part(folder, name) for name in names]
    total, done, wrong = sum(len(part.table) for part in parts), 0, []
    with ThreadPoolExecutor(threads) as pool:
        for looked, bad in pool.map(lambda work: _verify_some(folder, *work), list(_work(parts))):
            done += looked
            wrong += bad
            if tell is not None:
                tell("verifying", done, total)
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong):,} of {total:,} images are not what was packed, the first is {wrong[0]}; remove "
            "that shard and pack the same images again: only what is missing is made anew"
        )
    return total


def _work(parts: Sequence[Packed], images: int = 1024) -> Iterator[tuple[Packed, int, int]]:
    for part in parts:
        for start in range(0, len(part.table), images):
            yield part, start, min(start + images, len(part.table))


def _verify_some(folder: Path, part: Packed, start: int, end: int) -> tuple[int, list[str]]:
    """How many images were looked at, and the names of those that are wrong."""
    wrong = []
    shard, file = -1, None
    try:
        for number in range(start, end):
            row = part.table.rows[number]
            if int(row["shard"]) != shard:
                if file is not None:
                    file.close()
                shard = int(row["shard"])
                path = folder / part.table.shards[shard]
                try:
                    file = path.open("rb")
                except OSError as fault:
                    raise DataError(f"{path}: cannot be read: {fault.strerror}; pack the same images again") from None
            assert file is not None
            file.seek(int(row["offset"]))
            if zlib.crc32(file.read(int(row["length"]))) != part.checks[number]:
                wrong.append(part.table.name(number))
    finally:
        if file is not None:
            file.close()
    return end - start, wrong
