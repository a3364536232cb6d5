"""The protocol of formats: how each way to keep encoded images on disk tells the scan which images there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.table import Objects, Rows, Strings
from paceline.errors import DataError
from paceline.files import disk_faults

SplitName = Literal["training", "validation", "all"]
"""`all` is data without a validation split of their own."""

UNLABELED = -(2**31)
"""The label of an image whose file gives none."""

MOST_OBJECTS = 65_535
"""The most objects that a row can count."""

IMAGE_ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif",
)  # fmt: skip


@dataclass(frozen=True)
class ScanUnit:
    """What is scanned as a whole, and again when its stamp changes: one folder of images, or one shard."""

    name: str
    """Its path relative to the data folder, with '/'; '' is the data folder itself."""
    split: SplitName
    stamp: tuple[int, int]
    """Size (of a folder 0, or the time of the file that annotates it) and modification time in nanoseconds."""
    subfolders: tuple[str, ...] = ()
    """Names of the folders inside a folder, so that an unchanged one need not be listed again."""
    depth: int = 0
    """How many folders of its path lie above those of the classes."""


@dataclass(frozen=True)
class UnitImages:
    """The images of one scan unit, in the order of the file or of their names."""

    rows: Rows
    """`shard` counts into `shards`, `first_object` into `objects`, `label` into `names`; splits.py renumbers them."""
    shards: Sequence[str] | Strings
    """Paths relative to the data folder, with '/'."""
    keys: Sequence[str] | Strings
    """File name stem or __key__ of each image, without folders: images are sorted by it in every format."""
    objects: Objects = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    names: tuple[str, ...] = ()
    """The classes that labels count into; empty where labels are the numbers that the files hold."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many files (by ending) or samples were skipped where only images should be."""


class Format(Protocol):
    """One way to keep images on disk; a module with these names is a format. Faults are DataErrors that name the file.

    An image is a byte range of a file: that is what the loader reads. A format that compresses several images together
    (parquet, compressed tars) does not fit, and `paceline data pack` cannot read it either: such data must be written
    out first, as WebDataset tars or in class folders.
    """

    @property
    def KIND(self) -> str:  # noqa: N802 - constants of a module
        """Its name in Index.kind."""

    @property
    def FIRST_LABEL(self) -> int:  # noqa: N802
        """The number of the first class in files that hold numbers, unless the settings say otherwise."""

    def recognize(self, folder: Path) -> bool:
        """Whether the folder holds this format; looks at a few names only."""

    def units(self, folder: Path, before: Mapping[str, ScanUnit], /) -> list[ScanUnit]:
        """All scan units with their present stamps, in a fixed order; `before` is what the last scan saw, by name."""

    def scan(self, folder: Path, unit: ScanUnit) -> UnitImages:
        """Find every image of one unit; called from several threads, and only for units that changed."""

    def classes(self, folder: Path, /) -> tuple[str, ...] | None:
        """The class names in their order, where the format stores them (packs); else None."""

    def notes(self, units: Sequence[ScanUnit], images: Sequence[UnitImages], /) -> tuple[str, ...]:
        """Notes for the user: how the files were read and what was skipped."""


SPLIT_WORDS: dict[SplitName, tuple[str, ...]] = {
    "training": ("train", "training"),
    "validation": ("val", "valid", "validation", "eval", "test"),
}
"""What a split is called; of several folders for validation the first counts: a test split often has no labels."""


def split_of(path: str) -> SplitName:
    """The split that a shard's name, or else its folder's name, speaks of: 'train-00001.tar', 'val/0.tfrecord'."""
    for name in reversed(path.lower().split("/")):
        for split, words in SPLIT_WORDS.items():
            if re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", name):
                return split
    return "all"


_NOT_DATA = ("lost+found", "__MACOSX")
_SHARD = re.compile(r"\.tfrecords?$|-\d{5}-of-\d{5}$|\.tar$", re.IGNORECASE)
_COMPRESSED = re.compile(r"\.t?gz$|\.tar\.\w+$", re.IGNORECASE)


def visible_entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder, in no order, without hidden files and what disks and archives keep for themselves."""
    with disk_faults(DataError, folder, "cannot be read"), os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith(".") and entry.name not in _NOT_DATA)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether this is a folder, or a link to one; a DataError where the link may not be followed."""
    with disk_faults(DataError, Path(entry.path), "cannot be read", "remove the link, or allow to follow it"):
        return entry.is_dir()


def is_file(entry: os.DirEntry[str]) -> bool:
    """The same for a file."""
    with disk_faults(DataError, Path(entry.path), "cannot be read", "remove the link, or allow to follow it"):
        return entry.is_file()


@contextmanager
def open_shard(path: Path) -> Iterator[int]:
    """The descriptor of a file that is read here and there."""
    with disk_faults(DataError, path, "cannot be read"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def holds_shards(folder: Path) -> bool:
    """Whether the folder holds files with many images each; a compressed one is only what images were unpacked from."""
    return any(_SHARD.search(entry.name) for entry in visible_entries(folder))


def shard_units(folder: Path, pattern: re.Pattern[str]) -> list[ScanUnit]:
    """The shards whose names match, here and in folders named after a split; a test split only if there is no other."""
    names = [*_matching(folder, "", pattern)]
    subfolders = (entry.name for entry in visible_entries(folder) if split_of(entry.name) != "all" and is_folder(entry))
    for subfolder in sorted(subfolders):
        names += _matching(folder, f"{subfolder}/", pattern)
    units = [ScanUnit(name, split_of(name), _stamp(folder / name)) for name in names]
    validation = [unit for unit in units if unit.split == "validation"]
    tests = [unit for unit in validation if re.search(r"(?<![a-z])test(?![a-z])", unit.name.lower())]
    return [unit for unit in units if unit not in tests] if len(tests) < len(validation) else units


def uncompressed_units(folder: Path, pattern: re.Pattern[str]) -> list[ScanUnit]:
    """The shards whose names match, of which none may be compressed."""
    units = shard_units(folder, pattern)
    for unit in units:
        if _COMPRESSED.search(unit.name):
            raise DataError(
                f"{folder / unit.name}: images in a compressed file cannot be read at random; unpack it first"
            )
    return units


def _matching(folder: Path, subfolder: str, pattern: re.Pattern[str]) -> list[str]:
    entries = visible_entries(folder / subfolder)
    return sorted(subfolder + entry.name for entry in entries if pattern.search(entry.name) and is_file(entry))


def _stamp(path: Path) -> tuple[int, int]:
    with disk_faults(DataError, path, "cannot be read"):
        status = path.stat()
    return status.st_size, status.st_mtime_ns


def valid_objects(boxes: NDArray[np.float64]) -> Objects:
    """Clip boxes (top, left, bottom, right) to the image, and drop those that then hold nothing."""
    clipped = np.clip(np.nan_to_num(boxes.reshape(-1, 4), nan=-1.0), 0, 1)
    holds_pixels = (clipped[:, 0] < clipped[:, 2]) & (clipped[:, 1] < clipped[:, 3])
    return clipped[holds_pixels][:MOST_OBJECTS].astype(np.float32)


def first_few(names: Sequence[str]) -> str:
    """Join names for a message, and only the first of many."""
    return ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])


def counted(count: int, one: str, several: str) -> str:
    """A count and the words that go with it: '1 file was', '1,024 files were'."""
    return f"{count:,} {one if count == 1 else several}"


def as_label(value: int) -> int:
    """A label that fits a row; a number that does not fit is no label."""
    return value if abs(value) < 1 << 31 else UNLABELED
