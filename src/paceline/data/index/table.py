"""What is known of every image of a data set before it is read: fixed-width rows, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("shard", "<u4"),
        ("label", "<i4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("first_object", "<u4"),
        ("objects", "<u2"),
        ("flags", "<u2"),
    ]
)
"""Where the encoded image is, its class, its size in pixels, and where its objects begin."""

Rows = NDArray[Any]
"""An array of ROW."""

Objects = NDArray[np.float32]
"""One object a row: top, left, bottom, right, as shares of the image."""


class Flag(IntFlag):
    """What an image's header says of it."""

    JPEG = 1
    """8-bit Huffman JPEG with 1 or 3 components: the fast decoder reads it."""
    SEQUENTIAL = 2
    """A JPEG that is not progressive."""
    TILED = 4
    """Written by Paceline's pack: the restart interval divides the blocks of a row."""
    UNREADABLE = 8
    """The header says no size (empty, cut, not an image): width = height = 0."""
    TURNED = 16
    """The EXIF orientation is not 1."""
    OTHER_LABEL = 32
    """The label is outside 0 .. classes - 1."""
    ACROSS = 64
    """The EXIF orientation exchanges width and height, which are given here as they are stored."""


class Strings:
    """Many short texts as one blob and where each ends, so that a million of them cost no objects."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.uint64]) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Strings:
        """The same texts, packed; names that are not UTF-8 are kept as the file system gave them."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @classmethod
    def joined(cls, parts: Sequence[Strings]) -> Strings:
        """The texts of all parts, one part after the other."""
        shifts = np.cumsum([0, *(len(part.blob) for part in parts)], dtype=np.uint64)
        ends = [part.ends + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
        blobs = [part.blob for part in parts]
        return cls(np.concatenate([np.zeros(0, np.uint8), *blobs]), np.concatenate([np.zeros(0, np.uint64), *ends]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self.ends):
            raise IndexError(f"text {number} of {len(self.ends)}")
        start = int(self.ends[number - 1]) if number else 0
        return self.blob[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        whole, start = self.blob.tobytes(), 0
        for end in self.ends.tolist():
            yield whole[start:end].decode("utf-8", "surrogateescape")
            start = end


@dataclass(frozen=True)
class Table:
    """One split, in the order of keys; an image's row number is its number everywhere."""

    rows: Rows
    shards: Strings
    """Path of each shard, relative to the data folder; an image file is a shard of its own."""
    keys: Strings
    """The name of each image without folder and ending."""
    objects: Objects

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, number: int) -> str:
        """Where a person finds the image: 'train/n01440764/x.JPEG', or 'train-00001.tar at byte 1,536'."""
        row = self.rows[number]
        # Every format that holds several images in a file begins with something else than an image.
        place = f" at byte {int(row['offset']):,}" if row["offset"] else ""
        return self.shards[int(row["shard"])] + place

    def objects_of(self, number: int) -> Objects:
        """The objects of one image."""
        row = self.rows[number]
        return self.objects[int(row["first_object"]) : int(row["first_object"]) + int(row["objects"])]


@dataclass(frozen=True)
class Index:
    """A whole data set: what is trained on, what is judged, and the names of the classes."""

    kind: str
    folder: Path
    classes: tuple[str, ...]
    training: Table
    validation: Table
    notes: tuple[str, ...] = ()
    """What a person should know of how it was made."""
