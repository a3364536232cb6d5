"""What every format of encoded images on disk tells the scan: its units, and the images in each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.table import ROW, Objects, Rows, Strings
from paceline.errors import DataError

Part = Literal["training", "validation", "all"]
"""`all` is data without a validation part of its own."""

UNLABELED = -(2**31)
"""The label of an image whose file names none."""

MOST_OBJECTS = 65_535
"""A row counts no more."""

IMAGE_ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif",
)  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """What is scanned, and scanned again when its stamp changes, as a whole: one folder of images, or one shard."""

    name: str
    """Its path relative to the data folder, with '/'; '' is the data folder itself."""
    part: Part
    stamp: tuple[int, int]
    """Size (0 for a folder) and time of the last change in nanoseconds."""
    below: tuple[str, ...] = ()
    """Names of the folders inside a folder, so that an unchanged one need not be listed again."""


@dataclass(frozen=True)
class Found:
    """The images of one unit, in the order of the file or of the names."""

    rows: Rows
    """`shard` counts into `shards`, `first_object` into `objects`, `label` into `names`; the scan renumbers them."""
    shards: Sequence[str] | Strings
    """Paths relative to the data folder, with '/'."""
    keys: Sequence[str] | Strings
    """File name stem or __key__ of each image, without folders: what images are ranked by in every format."""
    objects: Objects = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    names: tuple[str, ...] = ()
    """The classes that labels count into; empty where labels are the numbers that the files hold."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many files of each ending are no images, where only images should be."""


class Format(Protocol):
    """One way to keep images on disk; a module with these names is one. Faults are DataErrors that name the file."""

    @property
    def KIND(self) -> str:  # noqa: N802 - constants of a module
        """Its name in Index.kind."""

    @property
    def FIRST_LABEL(self) -> int:  # noqa: N802
        """The number of the first class in files that hold numbers, unless the settings say otherwise."""

    def recognize(self, folder: Path) -> bool:
        """Whether the folder holds this format; looks at a few names only."""

    def units(self, folder: Path, known: Mapping[str, Unit]) -> list[Unit]:
        """All units with their present stamps, in a fixed order; `known` is what the last scan saw."""

    def scan(self, folder: Path, unit: Unit) -> Found:
        """Every image of one unit; called from several threads, and only for units that changed."""

    def classes(self, folder: Path) -> tuple[str, ...] | None:
        """The class names in their order, where the format keeps them itself (packs); else None."""

    def notes(self, units: Sequence[Unit], founds: Sequence[Found], /) -> tuple[str, ...]:
        """What a person should know of how this format was read, and may miss of what its files hold."""


_PARTS: tuple[tuple[Part, str], ...] = (
    ("training", r"train|training"),
    ("validation", r"val|valid|validation|test|eval"),
)


def part_of(path: str) -> Part:
    """The part that a shard's name, or else its folder's name, speaks of: 'train-00001.tar', 'val/0.tfrecord'."""
    for name in reversed(path.lower().split("/")):
        for part, words in _PARTS:
            if re.search(rf"(?<![a-z])({words})(?![a-z])", name):
                return part
    return "all"


_SHARD = re.compile(r"\.tfrecords?$|-\d{5}-of-\d{5}$|\.tar$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.t?gz$|\.tar\.\w+$", re.IGNORECASE)


def listed(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder, in no order, without hidden files and what a disk keeps at its root."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith(".") and entry.name != "lost+found")
    except OSError as fault:
        raise DataError(f"{folder}: cannot be read: {fault.strerror}") from None


def holds_shards(folder: Path) -> bool:
    """Whether files with many images in each lie here; a compressed one is what images were unpacked from."""
    return any(_SHARD.search(entry.name) for entry in listed(folder))


def shard_units(folder: Path, matching: re.Pattern[str]) -> list[Unit]:
    """The shards whose names match, here and in folders named after a part, without a test part that has a rival."""
    names = [*_matching(folder, "", matching)]
    for below in sorted(entry.name for entry in listed(folder) if part_of(entry.name) != "all" and entry.is_dir()):
        names += _matching(folder, f"{below}/", matching)
    found = [Unit(name, part_of(name), _stamp(folder / name)) for name in names]
    judged = [unit for unit in found if unit.part == "validation"]
    tests = [unit for unit in judged if re.search(r"(?<![a-z])test(?![a-z])", unit.name.lower())]
    return [unit for unit in found if unit not in tests] if len(tests) < len(judged) else found


def plain_units(folder: Path, matching: re.Pattern[str]) -> list[Unit]:
    """The same, if none of them is compressed."""
    found = shard_units(folder, matching)
    for unit in found:
        if _COMPRESSED.search(unit.name):
            raise DataError(
                f"{folder / unit.name}: images in a compressed file cannot be read at random; unpack it first"
            )
    return found


def _matching(folder: Path, below: str, matching: re.Pattern[str]) -> list[str]:
    entries = listed(folder / below)
    return sorted(below + entry.name for entry in entries if matching.search(entry.name) and entry.is_file())


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def good_objects(boxes: NDArray[np.float64]) -> Objects:
    """Boxes of top, left, bottom, right, cut to the image; those that hold nothing are left out."""
    cut = np.clip(np.nan_to_num(boxes.reshape(-1, 4), nan=-1.0), 0, 1)
    return cut[(cut[:, 0] < cut[:, 2]) & (cut[:, 1] < cut[:, 3])][:MOST_OBJECTS].astype(np.float32)


def some_of(names: Sequence[str]) -> str:
    """Names for a message; of many, the first."""
    return ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])


def as_label(number: int) -> int:
    """A label that fits a row; what does not fit is no label."""
    return number if abs(number) < 1 << 31 else UNLABELED


def table_rows(count: int) -> Rows:
    """Rows to be filled in."""
    return np.zeros(count, ROW)
