"""The size of an encoded image and which decoder reads it, from its first bytes and without decoding it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable

from paceline.data.index.table import Flag

START = 4096
"""How many bytes of an image to hand in; few images need more."""

ReadMore = Callable[[int, int], bytes]
"""The bytes of the image from an offset on, fewer at its end: read_more(offset, count)."""

Look = tuple[int, int, Flag]
"""Width, height and flags."""

PILLOW_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What Pillow may be asked to read: some of its other readers start programs or hold no pictures."""

_UNREADABLE: Look = (0, 0, Flag.UNREADABLE)
_WHOLE = 1 << 26  # more than this of a rare format, or of a damaged file, is not read to learn its size
_SEGMENTS = 4096  # a header with more of them is a loop that damage made
_ORIENTATION = 0x0112


def look(start: bytes, read_more: ReadMore | None = None) -> Look:
    """Width, height and flags of the image that begins with `start`; UNREADABLE instead of any fault."""
    content = _Content(start, read_more)
    try:
        if start.startswith(b"\xff\xd8\xff"):
            found = _jpeg(content)
        elif start.startswith(b"\x89PNG\r\n\x1a\n"):
            found = _png(content)
        else:
            found = _other(content)
            if found[2] is Flag.UNREADABLE and start[:6] in (b"GIF87a", b"GIF89a"):
                found = _little(content.at(6, 2)), _little(content.at(8, 2)), Flag(0)
    except _Short:
        return _UNREADABLE
    return found if found[0] > 0 and found[1] > 0 else _UNREADABLE


def look_in(descriptor: int, offset: int, length: int, start: bytes | None = None) -> Look:
    """The same of an image inside an open file, of which the first bytes may be at hand."""

    def read_more(place: int, count: int) -> bytes:
        return os.pread(descriptor, max(0, min(count, length - place)), offset + place)

    return look(read_more(0, START) if start is None else start, read_more)


class _Short(Exception):
    """The image ends before its size is said."""


class _Content:
    """The bytes of an image, of which only the first are at hand."""

    def __init__(self, start: bytes, read_more: ReadMore | None) -> None:
        self.start = start
        self.read_more = read_more

    def at(self, offset: int, count: int) -> bytes:
        """Exactly these bytes."""
        found = self.up_to(offset, count)
        if len(found) < count:
            raise _Short
        return found

    def up_to(self, offset: int, count: int) -> bytes:
        """These bytes, fewer where the image ends."""
        if offset + count > len(self.start) and self.read_more is not None:
            return self.read_more(offset, count)
        return self.start[offset : offset + count]


def _big(number: bytes) -> int:
    return int.from_bytes(number, "big")


def _little(number: bytes) -> int:
    return int.from_bytes(number, "little")


def _jpeg(content: _Content) -> Look:
    """Segment after segment up to the frame header; EXIF data is on the way there."""
    place, turned = 2, Flag(0)
    for _ in range(_SEGMENTS):
        marker = _big(content.at(place, 2))
        if marker < 0xFF01 or marker == 0xFFFF:  # fill bytes, or stray ones as every decoder passes over
            place = _next_marker(content, place + 1)
            continue
        kind = marker & 0xFF
        if kind in (0xD9, 0xDA):
            return _UNREADABLE
        if kind == 0x01 or 0xD0 <= kind <= 0xD8:  # markers that stand alone
            place += 2
            continue
        length = _big(content.at(place + 2, 2))
        if length < 2:
            return _UNREADABLE
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return _frame(kind, content.at(place + 4, 6), turned)
        if kind == 0xE1 and content.up_to(place + 4, 6) == b"Exif\0\0":
            turned = _turned(content.up_to(place + 10, length - 8))
        place += 2 + length
    return _UNREADABLE


def _next_marker(content: _Content, place: int) -> int:
    """Where the next byte is that a marker may begin with."""
    while place < _WHOLE and (found := content.up_to(place, START)):
        if (ahead := found.find(b"\xff")) >= 0:
            return place + ahead
        place += len(found)
    raise _Short


def _frame(kind: int, body: bytes, turned: Flag) -> Look:
    """The size, and whether the fast decoder reads it: four components, 12 bits, arithmetic coding are Pillow's."""
    precision, height, width, components = body[0], _big(body[1:3]), _big(body[3:5]), body[5]
    flags = turned
    if kind <= 0xC2 and precision == 8 and components in (1, 3):
        flags |= Flag.JPEG if kind == 0xC2 else Flag.JPEG | Flag.SEQUENTIAL
    return width, height, flags


def _turned(exif: bytes) -> Flag:
    """Whether the first directory of EXIF data says an orientation other than upright."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(exif[:4])
    if order is None:
        return Flag(0)

    def number(at: int, count: int) -> int:
        return _little(exif[at : at + count]) if order == "little" else _big(exif[at : at + count])

    directory = number(4, 4)
    for entry in range(min(number(directory, 2), len(exif) // 12)):
        at = directory + 2 + 12 * entry
        if number(at, 2) == _ORIENTATION and at + 10 <= len(exif):
            return _flags_of(number(at + 8, 2))
    return Flag(0)


def _flags_of(orientation: int) -> Flag:
    """Of the eight orientations the first is upright, and the last four lie on their side."""
    if orientation not in range(2, 9):
        return Flag(0)
    return Flag.TURNED | Flag.ACROSS if orientation > 4 else Flag.TURNED


def _png(content: _Content) -> Look:
    """The first chunk says the size; EXIF data may follow before the pixels."""
    if content.at(12, 4) != b"IHDR":
        return _UNREADABLE
    width, height = _big(content.at(16, 4)), _big(content.at(20, 4))
    place = 33
    for _ in range(_SEGMENTS):
        head = content.up_to(place, 8)
        if len(head) < 8 or head[4:] in (b"IDAT", b"IEND"):
            break
        if head[4:] == b"eXIf":
            return width, height, _turned(content.up_to(place + 8, min(_big(head[:4]), 1 << 16)))
        place += 12 + _big(head[:4])
    return width, height, Flag(0)


def _other(content: _Content) -> Look:
    """Whatever Pillow makes of it: of a GIF, the first frame may be larger than what its header says."""
    if not content.start:
        return _UNREADABLE
    from PIL import Image  # noqa: PLC0415 - most data sets never need it

    try:
        with Image.open(io.BytesIO(content.up_to(0, _WHOLE)), formats=PILLOW_FORMATS) as image:
            if image.format == "TIFF":  # which Pillow turns itself
                return image.width, image.height, Flag(0)
            return image.width, image.height, _flags_of(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - a damaged file makes Pillow's many readers raise anything
        return _UNREADABLE
