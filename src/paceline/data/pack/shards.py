"""The files of a pack: shards with images one after the other, and for each split an index of where each image is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index import file
from paceline.data.index.formats import SplitName
from paceline.data.index.table import Rows, Strings, Table
from paceline.errors import DataError
from paceline.files import new_file, read_exactly
from paceline.progress import Progress, silent

PACK_VERSION = 1
"""Goes up when older versions of Paceline would read a pack wrongly."""
PLAN = "paceline-pack.json"
"""The file that marks a folder as a pack, finished or not, and says what it is made of."""
SPLIT_NAMES: tuple[SplitName, ...] = ("training", "validation", "all")

Checksums = NDArray[np.uint32]
"""The CRC-32 of each image's bytes."""

_THREADS = 4
_CHUNK = 1024
"""Images that a thread verifies at a time."""
_HEAD = b"paceline pack %03d\n"


@dataclass(frozen=True)
class PackedSplit:
    """One split of a pack: its images and their checksums."""

    name: str
    classes: tuple[str, ...]
    table: Table
    checksums: Checksums


def index_path(folder: Path, split: str) -> Path:
    """The path of a split's index."""
    return folder / f"{split}.index"


def shard_name(split: str, shard: int) -> str:
    """The file name of one shard."""
    return f"{split}-{shard:05}.pack"


def packed_splits(folder: Path) -> list[SplitName]:
    """The splits that a pack holds; none where the folder is no pack, or an unfinished one."""
    return [split for split in SPLIT_NAMES if index_path(folder, split).is_file()]


def write_split(folder: Path, split: PackedSplit) -> None:
    """Write the index of a split, whole or not at all."""
    file.write_arrays(index_path(folder, split.name), _header(split), _arrays(split))


def is_written(folder: Path, split: PackedSplit) -> bool:
    """Whether exactly this index is there already, so that nobody need scan it again."""
    stored, arrays = file.read_arrays(index_path(folder, split.name)), _arrays(split)
    return (
        stored is not None
        and stored.header == _header(split)
        and stored.arrays.keys() == arrays.keys()
        and all(np.array_equal(array, arrays[name]) for name, array in stored.arrays.items())
    )


def _arrays(split: PackedSplit) -> file.Arrays:
    table = split.table
    return {
        "rows": table.rows,
        "checks": split.checksums,
        "keys": table.keys.blob,
        "key_ends": table.keys.ends,
        "shards": table.shards.blob,
        "shard_ends": table.shards.ends,
        "objects": table.objects,
    }


def _header(split: PackedSplit) -> dict[str, Any]:
    return {"pack": PACK_VERSION, "split": split.name, "classes": [*split.classes]}


def read_split(folder: Path, name: str) -> PackedSplit:
    """Map the index of a split into memory, and check it."""
    path = index_path(folder, name)
    stored = file.read_arrays(path)
    if stored is None or "pack" not in stored.header:
        raise DataError(
            f"{path}: this index of a pack is damaged, or of an older Paceline; copy it again, or pack the same images "
            "again"
        )
    header, arrays = stored.header, stored.arrays
    if header["pack"] != PACK_VERSION:
        raise DataError(
            f"{path}: a pack of version {header['pack']}, but this Paceline reads {PACK_VERSION}; update Paceline"
        )
    keys, shards = Strings(arrays["keys"], arrays["key_ends"]), Strings(arrays["shards"], arrays["shard_ends"])
    table = Table(arrays["rows"], shards, keys, arrays["objects"])
    return PackedSplit(header["split"], tuple(header["classes"]), table, arrays["checks"])


@contextmanager
def new_shard(path: Path) -> Iterator[IO[bytes]]:
    """Write a shard; it gets its name when it is complete and on disk."""
    with new_file(path, sync=True) as shard:
        shard.write(_HEAD % PACK_VERSION)
        yield shard


def finish_shard(path: Path, rows: Rows, checksums: Checksums) -> None:
    """Mark a shard as complete by writing its rows beside it."""
    header = {"pack": PACK_VERSION, "bytes": path.stat().st_size}
    file.write_arrays(path.with_suffix(".rows"), header, {"rows": rows, "checks": checksums})


def finished_shard(path: Path, images: int) -> tuple[Rows, Checksums] | None:
    """The rows and checksums of a complete shard; None where it must be written again."""
    stored = file.read_arrays(path.with_suffix(".rows"))
    if stored is None or stored.header.get("pack") != PACK_VERSION or len(stored.arrays["rows"]) != images:
        return None
    if not path.is_file() or path.stat().st_size != stored.header["bytes"]:
        return None
    return stored.arrays["rows"], stored.arrays["checks"]


def verify_pack(folder: Path, progress: Progress = silent) -> int:
    """Read every image of a pack and compare its checksum; returns the number of images."""
    names = packed_splits(folder)
    if not names:
        raise DataError(f"{folder}: there is no finished pack here; write one with paceline data pack SOURCE {folder}")
    splits = [read_split(folder, name) for name in names]
    total, done, wrong = sum(len(split.table) for split in splits), 0, list[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for count, bad in pool.map(lambda chunk: _verify_chunk(folder, *chunk), list(_chunks(splits))):
            done += count
            wrong += bad
            progress("verifying", done, total)
    if wrong:
        raise DataError(
            f"{folder}: {len(wrong):,} of {total:,} images are not what was packed, the first is {wrong[0]}; remove "
            "that shard and pack the same images again: only what is missing is made anew"
        )
    return total


def _chunks(splits: Sequence[PackedSplit]) -> Iterator[tuple[PackedSplit, range]]:
    for split in splits:
        for start in range(0, len(split.table), _CHUNK):
            yield split, range(start, min(start + _CHUNK, len(split.table)))


def _verify_chunk(folder: Path, split: PackedSplit, images: range) -> tuple[int, list[str]]:
    """How many images were read, and the names of those that are wrong."""
    wrong = []
    for image in images:
        name, offset, length = split.table.span(image)
        path = folder / name
        try:
            intact = zlib.crc32(read_exactly(path, offset, length)) == split.checksums[image]
        except DataError:  # the shard is too short
            intact = False
        except OSError as fault:
            raise DataError(f"{path}: cannot be read: {fault.strerror}; pack the same images again") from None
        if not intact:
            wrong.append(split.table.name(image))
    return len(images), wrong
