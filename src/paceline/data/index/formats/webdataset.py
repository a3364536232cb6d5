"""Images in WebDataset tars: an own scan of the headers, and samples put together by their keys."""

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
    Found,
    Unit,
    as_label,
    good_objects,
    plain_units,
    shard_units,
    table_rows,
)
from paceline.data.index.image_header import START, look_in
from paceline.data.index.table import Objects
from paceline.errors import DataError

KIND = "webdataset"
TRUE_KEY = "paceline_key"
"""What a sample's JSON calls its key where the name in the tar cannot be it: there, a dot ends the key."""
FIRST_LABEL = 0

_FILES = re.compile(r"\.tar$|\.tar\.\w+$|\.tgz$", re.IGNORECASE)
_BLOCK = 512
_LONGEST_NAME = 1 << 20
"""More bytes than this of names or of a label are damage."""

_IMAGES = ("jpg", "jpeg", "png")
_LABELS = ("cls", "json")
_NO_OBJECTS = np.zeros((0, 4), np.float32)
_NO_IMAGE = "no image"
"""What is left out: samples that have a label, and no image among the files of the tar."""


def recognize(folder: Path) -> bool:
    """Whether tars lie here or in folders named after a part."""
    return bool(shard_units(folder, _FILES))


def units(folder: Path, known: Mapping[str, Unit]) -> list[Unit]:
    """Every tar."""
    del known
    return plain_units(folder, _FILES)


@dataclass
class _Sample:
    """What the members of one key say."""

    key: str
    image: tuple[int, int, int, int, int] | None = None
    """Offset, length, width, height, flags."""
    label: int = UNLABELED
    objects: Objects | None = None


def scan(folder: Path, unit: Unit) -> Found:
    """Every sample of one tar that has an image."""
    path = folder / unit.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = _samples(descriptor, path)
        finally:
            os.close(descriptor)
    except OSError as fault:
        raise DataError(f"{path}: cannot be read: {fault.strerror}") from None
    samples = [sample for sample in whole if sample.image is not None]
    labeled = sum(sample.image is None and sample.label != UNLABELED for sample in whole)
    objects = [_NO_OBJECTS if sample.objects is None else sample.objects for sample in samples]
    rows = table_rows(len(samples))
    if samples:
        columns = np.array([sample.image for sample in samples], np.uint64).T
        rows["offset"], rows["length"], rows["width"], rows["height"], rows["flags"] = columns
    rows["label"] = [sample.label for sample in samples]
    rows["objects"] = [len(some) for some in objects]
    rows["first_object"] = np.cumsum(rows["objects"], dtype=np.int64) - rows["objects"]
    keys, left_out = [sample.key for sample in samples], {_NO_IMAGE: labeled} if labeled else {}
    return Found(rows, [unit.name], keys, np.concatenate([_NO_OBJECTS, *objects]), left_out=left_out)


def classes(folder: Path) -> tuple[str, ...] | None:
    """The names that `paceline data convert` leaves beside the tars; else labels are numbers only."""
    try:
        names = json.loads((folder / "metadata.json").read_text()).get("classes")
    except (OSError, ValueError, AttributeError):  # none, or that of another program
        return None
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if good and names else None


def notes(_: Sequence[Unit], founds: Sequence[Found]) -> tuple[str, ...]:
    """What a person may miss: samples without an image, which is perhaps a link to another file."""
    count = sum(found.left_out.get(_NO_IMAGE, 0) for found in founds)
    what = "sample has a label and no image" if count == 1 else "samples have a label and no image"
    return (f"{count:,} {what}: links in tars are not followed",) if count else ()


def _samples(descriptor: int, path: Path) -> list[_Sample]:
    """Members are of one sample when they share the folder and the name up to its first dot."""
    found: dict[str, _Sample] = {}
    for member in _members(descriptor, path):
        parent, _, name = member.name.rpartition("/")
        key, _, ending = name.partition(".")
        ending = ending.lower()
        if not key or ending not in (*_IMAGES, *_LABELS):
            continue
        sample = found.setdefault(f"{parent}/{key}", _Sample(key))
        if ending in _LABELS:
            content = os.pread(descriptor, min(member.size, _LONGEST_NAME), member.place)
            _read_label(sample, content, ending)
        elif sample.image is None and member.size < 1 << 32:
            width, height, flags = look_in(descriptor, member.place, member.size, member.start)
            sample.image = (member.place, member.size, width, height, int(flags))
    return list(found.values())


def _read_label(sample: _Sample, content: bytes, ending: str) -> None:
    """A whole number, or JSON with 'label' or 'cls', and perhaps 'bbox' and the true key; the rest changes nothing."""
    try:
        if ending == "cls":
            sample.label = as_label(int(content.decode("ascii")))
            return
        said = json.loads(content)
        if not isinstance(said, dict):
            return
        label = said.get("label", said.get("cls"))
        if isinstance(label, int | str):
            sample.label = as_label(int(label))
        if isinstance(said.get("bbox"), list):
            boxes = np.array(said["bbox"][: 4 * MOST_OBJECTS], np.float64)
            sample.objects = good_objects(boxes) if boxes.size % 4 == 0 else None
        sample.key = _true_key(said.get(TRUE_KEY)) or sample.key
    except (ValueError, TypeError, OverflowError, RecursionError):
        return


def _true_key(said: object) -> str | None:
    """A key that could be the name of a file; it may become one, and then leads to no other folder."""
    if not isinstance(said, str) or re.search(r"[/\0]", said):
        return None
    said.encode("utf-8", "surrogateescape")  # half a character is none
    return said


@dataclass(frozen=True)
class _Member:
    """A file in a tar: its name, where its content is, and the content's first bytes."""

    name: str
    place: int
    size: int
    start: bytes


def _members(descriptor: int, path: Path) -> Iterator[_Member]:
    """Every regular file, with names and sizes from whichever header says them last."""
    end, place = os.fstat(descriptor).st_size, 0
    always: dict[str, str] = {}
    once: dict[str, str] = {}
    while place < end:
        block = os.pread(descriptor, _BLOCK + START, place)
        head = block[:_BLOCK]
        if len(head) == _BLOCK and not any(head):
            return
        kind, size = _header(head, path, place)
        said = always | once
        if kind not in b"xgLK":
            size = _number(said.get("size", ""), size)
        if size > end - place - _BLOCK:
            raise DataError(
                f"{path} at byte {place:,}: the tar is cut, or a file in it is not {size:,} bytes long; copy it again"
            )
        if kind in b"xgLK":
            content = _extra(descriptor, path, place, size)
            if kind == b"g":
                always |= _pax(content)
            elif kind != b"K":
                once |= _pax(content) if kind == b"x" else {"path": _text(content)}
        else:
            if kind == b"S" or any(key.startswith("GNU.sparse") for key in once):
                raise DataError(f"{path} at byte {place:,}: files with holes are not read; write the tar without them")
            if kind in b"\x0007":
                start = block[_BLOCK : _BLOCK + min(size, START)]
                yield _Member(said.get("path") or _own_name(head), place + _BLOCK, size, start)
            once = {}
        place += _BLOCK + -(-size // _BLOCK) * _BLOCK


def _header(head: bytes, path: Path, place: int) -> tuple[bytes, int]:
    """Type and size, once the checksum is right."""
    if len(head) < _BLOCK:
        raise DataError(f"{path} at byte {place:,}: the tar is cut; copy it again")
    checksum = sum(head[:148]) + sum(head[156:]) + 8 * 32
    if _octal(head[148:156]) != checksum:
        raise DataError(f"{path} at byte {place:,}: the checksum of a header is wrong; copy the tar again")
    # Sizes of 8 GiB and more do not fit eleven octal digits; the first bit then says that 95 bits follow.
    size = int.from_bytes(head[125:136], "big") if head[124] == 0x80 else _octal(head[124:136])
    if size is None:
        raise DataError(f"{path} at byte {place:,}: a header says no size; copy the tar again")
    return head[156:157], size


def _octal(digits: bytes) -> int | None:
    text = digits.strip(b" \0")
    return int(text, 8) if re.fullmatch(rb"[0-7]+", text) else 0 if not text else None


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else otherwise


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _own_name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extra(descriptor: int, path: Path, place: int, size: int) -> bytes:
    """The content of a header that speaks of the next file."""
    if size > _LONGEST_NAME:
        raise DataError(f"{path} at byte {place:,}: a header of {size:,} bytes is damage; copy the tar again")
    return os.pread(descriptor, size, place + _BLOCK)


def _pax(content: bytes) -> dict[str, str]:
    """Records of '30 path=some/name' and a line end, their length counted in."""
    found, place = {}, 0
    while place < len(content):
        digits, _, _ = content[place : place + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        if length <= len(digits) + 1:
            break
        key, _, value = content[place + len(digits) + 1 : place + length - 1].partition(b"=")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        place += length
    return found
