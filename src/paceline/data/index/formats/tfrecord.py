"""Images in TFRecord files, read without TensorFlow: framing, checksums and the protobuf of tf.train.Example."""

from __future__ import annotations

import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.formats import (
    UNLABELED,
    ScanUnit,
    UnitImages,
    as_label,
    open_shard,
    shard_units,
    uncompressed_units,
    valid_objects,
)
from paceline.data.index.image_header import HEADER_BYTES, read_header
from paceline.data.index.table import ROW, Objects
from paceline.errors import DataError

KIND = "tfrecord"
FIRST_LABEL = 1

_FILES = re.compile(r"\.tfrecords?$|-\d{5}-of-\d{5}$|\.tfrecords?\.gz$|-\d{5}-of-\d{5}\.gz$", re.IGNORECASE)
_HEAD = 12
"""Bytes of a record's length and its checksum; the content and its checksum of 4 bytes follow."""

_LARGEST = 1 << 28
"""A longer record is damage, not an image."""

_IMAGE = (b"image/encoded", b"image", b"image_raw")
_LABEL = (b"image/class/label", b"label")
_NAME = (b"image/filename", b"filename", b"__key__")
_SIDES = tuple(b"image/object/bbox/" + side for side in (b"ymin", b"xmin", b"ymax", b"xmax"))

Span = tuple[int, int]
"""Start and end of something in a record."""


def recognize(folder: Path) -> bool:
    """Whether files like train-00000-of-01024 or x.tfrecord lie here or in folders named after a split."""
    return bool(shard_units(folder, _FILES))


def units(folder: Path, _before: Mapping[str, ScanUnit]) -> list[ScanUnit]:
    """Every file."""
    return uncompressed_units(folder, _FILES)


def scan(folder: Path, unit: ScanUnit) -> UnitImages:
    """Find every image of one file, and test its checksums."""
    path = folder / unit.name
    images: list[tuple[int, ...]] = []
    keys: list[str] = []
    objects: list[Objects] = []
    with open_shard(path) as descriptor:
        for start, record in _records(descriptor, path):
            try:
                (first, last), label, name, boxes = _example(record)
            except _Malformed as fault:
                raise DataError(f"{path} at byte {start - _HEAD:,}: {fault}; write the file again") from None
            content = record[first : min(last, first + HEADER_BYTES)]
            width, height, flags = read_header(descriptor, start + first, last - first, content)
            images.append((start + first, last - first, 0, label, width, height, 0, len(boxes), int(flags)))
            keys.append(PurePosixPath(name).stem if name else f"{path.name}-{len(keys):08d}")
            objects.append(boxes)
    rows = np.zeros(len(images), ROW)
    rows[:] = images
    rows["first_object"] = np.cumsum(rows["objects"], dtype=np.int64) - rows["objects"]
    return UnitImages(rows, [unit.name], keys, np.concatenate([np.zeros((0, 4), np.float32), *objects]))


def classes(_folder: Path) -> tuple[str, ...] | None:
    """None: labels are numbers."""
    return None


def notes(_units: Sequence[ScanUnit], _images: Sequence[UnitImages]) -> tuple[str, ...]:
    """Mention that checksums could not be tested."""
    if _checksum() is None:
        return ("checksums of TFRecords were not tested, because google-crc32c is not installed",)
    return ()


@cache
def _checksum() -> Callable[[bytes], int] | None:
    """CRC32C, where it is installed and fast; in plain Python it would take days."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import google_crc32c  # noqa: PLC0415
        except ImportError:
            return None
    return google_crc32c.value if google_crc32c.implementation != "python" else None


def _matches(content: bytes, masked: bytes) -> bool:
    checksum = _checksum()
    if checksum is None:
        return True
    value = checksum(content)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(masked, "little")


def _records(descriptor: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """The offset of each record of a file, and its bytes."""

    def fault(what: str) -> DataError:
        return DataError(f"{path} at byte {offset:,}: {what}; copy the file again")

    size, offset = os.fstat(descriptor).st_size, 0
    while offset < size:
        head = os.pread(descriptor, _HEAD, offset)
        if len(head) < _HEAD:
            raise fault("the file is cut")
        if not _matches(head[:8], head[8:]):
            raise fault("the checksum of a record's length is wrong")
        length = int.from_bytes(head[:8], "little")
        if length > size - offset - _HEAD - 4:
            raise fault(f"the file is cut, or a record is not {length:,} bytes long")
        if length > _LARGEST:
            raise fault(f"a record of {length:,} bytes is no image")
        content = os.pread(descriptor, length + 4, offset + _HEAD)
        if len(content) < length + 4:
            raise fault("the file is cut")
        if not _matches(content[:-4], content[-4:]):
            raise fault("the checksum of a record is wrong")
        yield offset + _HEAD, content[:-4]
        offset += _HEAD + length + 4


class _Malformed(Exception):
    """The record is no Example with an image."""


def _example(record: bytes) -> tuple[Span, int, str, Objects]:
    """The span of the encoded image, its label, its name and its objects."""
    features: dict[bytes, Span] = {}
    # Example.features (field 1) is a map (field 1 again) whose entries have a key (1) and a feature (2).
    for number, wire, outer in _fields(record, 0, len(record)):
        for inner_number, inner_wire, entry in _fields(record, *outer) if (number, wire) == (1, 2) else ():
            if (inner_number, inner_wire) == (1, 2):
                pair = dict(_messages(record, entry))
                features[record[slice(*pair.get(1, (0, 0)))]] = pair.get(2, (0, 0))
    image = next((span for name in _IMAGE if name in features for span in _values(record, features[name], 1)), None)
    if image is None:
        raise _Malformed(f"a record has no image ({_IMAGE[0].decode()!r})")
    label = next((_integers(record, features[name]) for name in _LABEL if name in features), [])
    name = next((record[slice(*span)] for n in _NAME if n in features for span in _values(record, features[n], 1)), b"")
    boxes = np.zeros((0, 4), np.float32)
    if all(side in features for side in _SIDES):
        sides = [_floats(record, features[side]) for side in _SIDES]
        count = min(len(side) for side in sides)
        boxes = valid_objects(np.stack([side[:count] for side in sides], axis=1))
    return image, as_label(label[0]) if label else UNLABELED, name.decode("utf-8", "surrogateescape"), boxes


def _varint(record: bytes, offset: int, end: int) -> tuple[int, int]:
    """The integer at an offset, 7 bits a byte, and the offset behind it."""
    value = shift = 0
    while offset < end and shift < 70:
        byte = record[offset]
        value |= (byte & 0x7F) << shift
        offset += 1
        if byte < 0x80:
            return value, offset
        shift += 7
    raise _Malformed("a record is no tf.train.Example")


def _fields(record: bytes, offset: int, end: int) -> Iterator[tuple[int, int, Span]]:
    """Number, wire type and span of each field of a message; lengths never reach beyond the message."""
    while offset < end:
        tag, offset = _varint(record, offset, end)
        wire = tag & 7
        start = offset
        if wire == 0:  # a varint
            _, offset = _varint(record, offset, end)
        elif wire == 2:  # bytes, a text or a message, with its length in front
            length, start = _varint(record, offset, end)
            offset = start + length
        else:  # 8 or 4 bytes; other wire types reach beyond the end, and are refused
            offset += {1: 8, 5: 4}.get(wire, end)
        if offset > end:
            raise _Malformed("a record is no tf.train.Example")
        yield tag >> 3, wire, (start, offset)


def _messages(record: bytes, span: Span) -> Iterator[tuple[int, Span]]:
    return ((number, inner) for number, wire, inner in _fields(record, *span) if wire == 2)


def _values(record: bytes, feature: Span, kind: int) -> list[Span]:
    """The values in a feature's list of one kind: 1 bytes, 2 floats, 3 integers."""
    return [
        value
        for number, inner in _messages(record, feature)
        if number == kind
        for _, _, value in _fields(record, *inner)
    ]


def _integers(record: bytes, feature: Span) -> list[int]:
    """The first of a list of integers, packed or not; empty where there is none."""
    for start, end in _values(record, feature, 3):
        if start < end:
            value, _ = _varint(record, start, end)
            return [value - (1 << 64) if value >= 1 << 63 else value]
    return []


def _floats(record: bytes, feature: Span) -> NDArray[np.float64]:
    """A list of floats, packed or not."""
    content = b"".join(record[slice(*span)] for span in _values(record, feature, 2))
    return np.array(struct.unpack(f"<{len(content) // 4}f", content[: len(content) // 4 * 4]), np.float64)
