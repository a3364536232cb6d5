"""The tables of an index: a fixed-width row for every image, with its byte range, label, size and flags."""

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
"""The byte range of the encoded image, its class, its size in pixels, and where its objects begin."""

Rows = NDArray[Any]
"""An array of ROW."""

Objects = NDArray[np.float32]
"""One object a row: top, left, bottom, right, as fractions of the image."""


class Flag(IntFlag):
    """What the header of an image, and its label, say about it."""

    JPEG = 1
    """8-bit Huffman JPEG with 1 or 3 components: the fast decoder reads it."""
    SEQUENTIAL = 2
    """A JPEG that is not progressive."""
    TILED = 4
    """Written by Paceline's pack: the restart interval divides the blocks of a row."""
    UNREADABLE = 8
    """The header gives no size (empty, cut off, not an image): width = height = 0."""
    TURNED = 16
    """The EXIF orientation is not 1."""
    OTHER_LABEL = 32
    """The label is outside 0 .. classes - 1."""
    ACROSS = 64
    """The EXIF orientation swaps width and height; rows hold them as they are stored."""


class Strings:
    """Many short texts as one blob and the offset where each ends, so that a million of them cost no objects."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.uint64]) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Strings:
        """Pack texts; names that are not UTF-8 are kept as the file system gave them."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @classmethod
    def joined(cls, several: Sequence[Strings]) -> Strings:
        """Concatenate the texts of several."""
        # The ends of each count from the start of its own blob; its texts now follow all blobs before it.
        shifts = np.cumsum([0, *(len(strings.blob) for strings in several)], dtype=np.uint64)
        ends = [strings.ends + shift for strings, shift in zip(several, shifts[:-1], strict=True)]
        blobs = [strings.blob for strings in several]
        return cls(np.concatenate([np.zeros(0, np.uint8), *blobs]), np.concatenate([np.zeros(0, np.uint64), *ends]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"text {index} of {len(self.ends)}")
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        content, start = self.blob.tobytes(), 0
        for end in self.ends.tolist():
            yield content[start:end].decode("utf-8", "surrogateescape")
            start = end

    def slice(self, first: int, count: int) -> Strings:
        """The texts from `first` on, without copying them."""
        start = int(self.ends[first - 1]) if first else 0
        ends = self.ends[first : first + count] - np.uint64(start)
        return Strings(self.blob[start : start + int(ends[-1]) if count else start], ends)


@dataclass(frozen=True)
class Table:
    """The images of one split, in the order of their keys; the index of a row is the index of the image everywhere."""

    rows: Rows
    shards: Strings
    """Path of each shard, relative to the data folder; an image file is a shard of its own."""
    keys: Strings
    """File name of each image without folder and ending."""
    objects: Objects

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """Where a person finds the image: 'train/n01440764/x.JPEG', or 'train-00001.tar at byte 1,536'."""
        path, offset, _ = self.span(index)
        # Every format that holds several images in a file begins with something other than an image.
        return f"{path} at byte {offset:,}" if offset else path

    def span(self, index: int) -> tuple[str, int, int]:
        """The file that an image is in, as a path relative to the data folder, its first byte there and its length."""
        row = self.rows[index]
        return self.shards[int(row["shard"])], int(row["offset"]), int(row["length"])

    def place(self, index: int) -> dict[str, str | int]:
        """Where an image is, as a row of a run's files says it."""
        path, offset, _ = self.span(index)
        return {"name": self.name(index), "path": path, "offset": offset}

    def objects_of(self, index: int) -> Objects:
        """The objects of one image."""
        row = self.rows[index]
        return self.objects[int(row["first_object"]) : int(row["first_object"]) + int(row["objects"])]


@dataclass(frozen=True)
class Index:
    """A data set: training images, validation images, and the names of the classes."""

    kind: str
    folder: Path
    classes: tuple[str, ...]
    training: Table
    validation: Table
    notes: tuple[str, ...] = ()
    """What the user should know: how the files were read and what was skipped."""

    def splits(self) -> list[tuple[str, Table]]:
        """The splits that hold images, by name."""
        both = [("training", self.training), ("validation", self.validation)]
        return [(name, table) for name, table in both if len(table)]
