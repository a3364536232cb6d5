"""Images in WebDataset tars: headers read by hand, twice as fast as tarfile, and members grouped into samples."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.index.formats import (
    MOST_OBJECTS,
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
from paceline.files import read_whole

KIND = "webdataset"
TRUE_KEY = "paceline_key"
"""What a sample's JSON calls its key where the key has a dot, which would end it in the name of a member."""
FIRST_LABEL = 0

_FILES = re.compile(r"\.tar$|\.tar\.\w+$|\.tgz$", re.IGNORECASE)
_BLOCK = 512
_LONGEST_NAME = 1 << 20
"""More bytes of a name or a label are damage."""

_IMAGES = ("jpg", "jpeg", "png")
_LABELS = ("cls", "json")
_NO_OBJECTS = np.zeros((0, 4), np.float32)
_NO_IMAGE = "no image"
"""Counts samples that are skipped because they have a label and no image in the tar."""


def recognize(folder: Path) -> bool:
    """Whether tars lie here or in folders named after a split."""
    return bool(shard_units(folder, _FILES))


def units(folder: Path, _before: Mapping[str, ScanUnit]) -> list[ScanUnit]:
    """Every tar."""
    return uncompressed_units(folder, _FILES)


@dataclass
class _Sample:
    """What the members with one key give."""

    key: str
    image: tuple[int, int, int, int, int] | None = None
    """Offset, length, width, height, flags."""
    label: int = UNLABELED
    objects: Objects | None = None


def scan(folder: Path, unit: ScanUnit) -> UnitImages:
    """Find every sample of one tar that has an image."""
    path = folder / unit.name
    with open_shard(path) as descriptor:
        everything = _samples(descriptor, path)
    samples = [sample for sample in everything if sample.image is not None]
    without_image = sum(sample.image is None and sample.label != UNLABELED for sample in everything)
    objects = [_NO_OBJECTS if sample.objects is None else sample.objects for sample in samples]
    rows = np.zeros(len(samples), ROW)
    if samples:
        columns = np.array([sample.image for sample in samples], np.uint64).T
        rows["offset"], rows["length"], rows["width"], rows["height"], rows["flags"] = columns
    rows["label"] = [sample.label for sample in samples]
    rows["objects"] = [len(boxes) for boxes in objects]
    rows["first_object"] = np.cumsum(rows["objects"], dtype=np.int64) - rows["objects"]
    keys = [sample.key for sample in samples]
    skipped = {_NO_IMAGE: without_image} if without_image else {}
    return UnitImages(rows, [unit.name], keys, np.concatenate([_NO_OBJECTS, *objects]), skipped=skipped)


def classes(folder: Path) -> tuple[str, ...] | None:
    """The names that `paceline data convert` leaves beside the tars; without them labels are numbers only."""
    try:
        names = json.loads(read_whole(folder / "metadata.json")).get("classes")
    except (OSError, ValueError, AttributeError, RecursionError):  # none, or that of another program
        return None
    valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if valid and names else None


def notes(_: Sequence[ScanUnit], images: Sequence[UnitImages]) -> tuple[str, ...]:
    """Mention samples without an image, which is perhaps a link to another file."""
    count = sum(unit_images.skipped.get(_NO_IMAGE, 0) for unit_images in images)
    what = "sample has a label and no image" if count == 1 else "samples have a label and no image"
    return (f"{count:,} {what}: links in tars are not followed",) if count else ()


def _samples(descriptor: int, path: Path) -> list[_Sample]:
    """Group members into samples: those that share the folder and the name up to its first dot."""
    samples: dict[str, _Sample] = {}
    for member in _members(descriptor, path):
        parent, _, name = member.name.rpartition("/")
        key, _, ending = name.partition(".")
        ending = ending.lower()
        if not key or ending not in (*_IMAGES, *_LABELS):
            continue
        sample = samples.setdefault(f"{parent}/{key}", _Sample(key))
        if ending in _LABELS:
            content = os.pread(descriptor, min(member.size, _LONGEST_NAME), member.offset)
            _read_label(sample, content, ending)
        elif sample.image is None and member.size < 1 << 32:
            width, height, flags = read_header(descriptor, member.offset, member.size, member.start)
            sample.image = (member.offset, member.size, width, height, int(flags))
    return list(samples.values())


def _read_label(sample: _Sample, content: bytes, ending: str) -> None:
    """Take an integer, or JSON with 'label' or 'cls' and perhaps 'bbox' and the true key; ignore anything else."""
    try:
        if ending == "cls":
            sample.label = as_label(int(content.decode("ascii")))
            return
        fields = json.loads(content)
        if not isinstance(fields, dict):
            return
        label = fields.get("label", fields.get("cls"))
        if isinstance(label, int | str):
            sample.label = as_label(int(label))
        if isinstance(fields.get("bbox"), list):
            boxes = np.array(fields["bbox"][: 4 * MOST_OBJECTS], np.float64)
            sample.objects = valid_objects(boxes) if boxes.size % 4 == 0 else None
        sample.key = _true_key(fields.get(TRUE_KEY)) or sample.key
    except (ValueError, TypeError, OverflowError, RecursionError):
        return


def _true_key(value: object) -> str | None:
    """A key that may become the name of a file, and then must not lead to another folder."""
    if not isinstance(value, str) or re.search(r"[/\0]", value):
        return None
    value.encode("utf-8", "surrogateescape")  # half a surrogate pair is no text
    return value


@dataclass(frozen=True)
class _Member:
    """A file in a tar: its name, the offset and size of its content, and the content's first bytes."""

    name: str
    offset: int
    size: int
    start: bytes


def _members(descriptor: int, path: Path) -> Iterator[_Member]:
    """Every regular file of a tar; extra headers (pax, GNU long names) override the name and size of the next one."""
    end, offset = os.fstat(descriptor).st_size, 0
    for_all: dict[str, str] = {}
    for_next: dict[str, str] = {}
    while offset < end:
        block = os.pread(descriptor, _BLOCK + HEADER_BYTES, offset)
        head = block[:_BLOCK]
        if len(head) == _BLOCK and not any(head):
            return
        kind, size = _header(head, path, offset)
        fields = for_all | for_next
        if kind not in b"xgLK":
            size = _integer(fields.get("size", ""), size)
        if size > end - offset - _BLOCK:
            raise DataError(
                f"{path} at byte {offset:,}: the tar is cut, or a file in it is not {size:,} bytes long; copy it again"
            )
        if kind in b"xgLK":
            content = _extra(descriptor, path, offset, size)
            if kind == b"g":
                for_all |= _pax(content)
            elif kind != b"K":
                for_next |= _pax(content) if kind == b"x" else {"path": _text(content)}
        else:
            if kind == b"S" or any(key.startswith("GNU.sparse") for key in for_next):
                raise DataError(f"{path} at byte {offset:,}: files with holes are not read; write the tar without them")
            if kind in b"\x0007":
                start = block[_BLOCK : _BLOCK + min(size, HEADER_BYTES)]
                yield _Member(fields.get("path") or _own_name(head), offset + _BLOCK, size, start)
            for_next = {}
        offset += _BLOCK + -(-size // _BLOCK) * _BLOCK


def _header(head: bytes, path: Path, offset: int) -> tuple[bytes, int]:
    """Type and size, once the checksum is right."""
    if len(head) < _BLOCK:
        raise DataError(f"{path} at byte {offset:,}: the tar is cut; copy it again")
    checksum = sum(head[:148]) + sum(head[156:]) + 8 * 32
    if _octal(head[148:156]) != checksum:
        raise DataError(f"{path} at byte {offset:,}: the checksum of a header is wrong; copy the tar again")
    # Sizes of 8 GiB and more do not fit eleven octal digits; the first bit then says that 95 bits follow.
    size = int.from_bytes(head[125:136], "big") if head[124] == 0x80 else _octal(head[124:136])
    if size is None:
        raise DataError(f"{path} at byte {offset:,}: a header says no size; copy the tar again")
    return head[156:157], size


def _octal(digits: bytes) -> int | None:
    text = digits.strip(b" \0")
    return int(text, 8) if re.fullmatch(rb"[0-7]+", text) else 0 if not text else None


def _integer(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else otherwise


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _own_name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extra(descriptor: int, path: Path, offset: int, size: int) -> bytes:
    """The content of an extra header, which speaks of the next file."""
    if size > _LONGEST_NAME:
        raise DataError(f"{path} at byte {offset:,}: a header of {size:,} bytes is damage; copy the tar again")
    return os.pread(descriptor, size, offset + _BLOCK)


def _pax(content: bytes) -> dict[str, str]:
    """Records of '30 path=some/name' and a line end; the number is the length of the whole record."""
    fields, offset = {}, 0
    while offset < len(content):
        digits, _, _ = content[offset : offset + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        if length <= len(digits) + 1:
            break
        key, _, value = content[offset + len(digits) + 1 : offset + length - 1].partition(b"=")
        fields[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        offset += length
    return fields
