"""Finds the images of a data set that training could not use, by decoding each of them once."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.index.table import Flag, Index, Table
from paceline.data.load.decode import MOST_PIXELS, Undecodable, decode_into
from paceline.data.pack.transcode import read_encoded
from paceline.errors import DataError
from paceline.progress import Progress, silent
from paceline.settings.data import Files

_CHUNK = 32
_PAUSE = 0.3
_THUMBNAIL = 8
"""Pixels a side of what an image is resized to when only its decoding matters."""


@dataclass(frozen=True)
class BadImage:
    """An image that training could not use."""

    split: str
    image: int
    name: str
    kind: str
    reason: str


def find_bad_images(
    index: Index, data: Files, threads: int, progress: Progress = silent
) -> Generator[BadImage, None, None]:
    """Decode every image once, whole, and yield each that cannot be decoded, in the order of the index."""
    chunks = [
        (split, table, range(first, min(first + _CHUNK, len(table))))
        for split, table in index.splits()
        for first in range(0, len(table), _CHUNK)
    ]
    total, done = sum(len(images) for _, _, images in chunks), 0

    def check_chunk(split: str, table: Table, images: range) -> list[BadImage]:
        faults = [(image, _fault(index, table, image, data)) for image in images]
        return [BadImage(split, image, table.name(image), *fault) for image, fault in faults if fault is not None]

    pool = ThreadPoolExecutor(threads, "check")
    try:
        for chunk, bad in zip(chunks, pool.map(lambda chunk: check_chunk(*chunk), chunks), strict=True):
            yield from bad
            done += len(chunk[2])
            progress("decoding", done, total)
    finally:
        pool.shutdown(cancel_futures=True)  # a caller that stops early need not wait for the rest


def _fault(index: Index, table: Table, image: int, data: Files) -> tuple[str, str] | None:
    """Why training could not use an image, as a kind and a reason; None where it could."""
    row = table.rows[image]
    flags, width, height = int(row["flags"]), int(row["width"]), int(row["height"])
    if flags & Flag.OTHER_LABEL:
        return "label outside the classes", f"its label {int(row['label'])} is none of the {len(index.classes)} classes"
    name, offset, length = table.span(image)
    path = index.folder / name
    try:
        encoded = _read(path, offset, length)
    except DataError as fault:
        return "cannot be read", str(fault).removeprefix(f"{path}: ")
    whole = (0, 0, width, height) if data.turns and flags & Flag.ACROSS else (0, 0, height, width)
    try:
        thumbnail = np.empty((_THUMBNAIL, _THUMBNAIL, 3), np.uint8)
        decode_into(encoded, flags, width, height, whole, False, data.resize, thumbnail, turn=data.turns)
    except Undecodable as fault:
        return _kind(row), str(fault)
    return None


def _read(path: Path, offset: int, length: int) -> bytes:
    """The bytes of an image; a disk that fails for a moment is asked once more."""
    try:
        return read_encoded(path, offset, length)
    except DataError:
        time.sleep(_PAUSE)
        return read_encoded(path, offset, length)


def _kind(row: Any) -> str:
    """The kind of an image that cannot be decoded."""
    if row["length"] == 0:
        return "empty"
    if row["flags"] & Flag.UNREADABLE:
        return "no image header"
    return "too large" if int(row["width"]) * int(row["height"]) > MOST_PIXELS else "damaged"


def count_repeated(table: Table) -> int:
    """How many images have the key and the label of another one before them."""
    # Tables are sorted by key and then by label, so that such images are neighbors.
    key_labels = zip(table.keys, table.rows["label"].tolist(), strict=True)
    return sum(before == here for before, here in pairwise(key_labels))
