"""Reads an encoded image's size, and which decoder it needs, from its first bytes; and brings any mode to RGB."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.data.index.table import Flag

if TYPE_CHECKING:
    from PIL import Image

HEADER_BYTES = 4096
"""How many bytes of an image to hand in; few images need more."""

_PILLOW_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What Pillow may be asked to read: some of its other readers start programs or hold no pictures."""

HEIF_ENDINGS = (".heic", ".heif")
RAW_ENDINGS = (".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")

ORIENTATION = 0x0112
"""The EXIF tag that says how to turn an image: 1 is upright, 5 to 8 lie on their side."""

ReadMore = Callable[[int, int], bytes]
"""Reads bytes of the image, fewer at its end: read_more(offset, count)."""

_MOST_BYTES = 1 << 26  # more than this of a rare format, or of a damaged file, is not read to learn its size
_MOST_SEGMENTS = 4096  # a header with more of them is a loop that damage made


class ImageHeader(NamedTuple):
    """The stored size of an image in pixels, and what else its header says."""

    width: int
    height: int
    flags: Flag


_UNREADABLE = ImageHeader(0, 0, Flag.UNREADABLE)


def parse_header(start: bytes, read_more: ReadMore | None = None) -> ImageHeader:
    """Read the header of the image that begins with `start`; whatever is wrong with it makes it UNREADABLE."""
    content = _Content(start, read_more)
    try:
        if start.startswith(b"\xff\xd8\xff"):
            header = _jpeg(content)
        elif start.startswith(b"\x89PNG\r\n\x1a\n"):
            header = _png(content)
        else:
            header = _other(content)
            if header.flags is Flag.UNREADABLE and start[:6] in (b"GIF87a", b"GIF89a"):
                header = ImageHeader(_little(content.at(6, 2)), _little(content.at(8, 2)), Flag(0))
    except _Short:
        return _UNREADABLE
    return header if header.width > 0 and header.height > 0 else _UNREADABLE


def read_header(descriptor: int, offset: int, length: int, start: bytes | None = None) -> ImageHeader:
    """Read the header of an image inside an open file; `start` is its first bytes, if they are at hand."""

    def read_more(skip: int, count: int) -> bytes:
        return os.pread(descriptor, max(0, min(count, length - skip)), offset + skip)

    return parse_header(read_more(0, HEADER_BYTES) if start is None else start, read_more)


def heif_installed() -> bool:
    """Whether pillow-heif is there, which reads HEIC, the format of many phones."""
    return find_spec("pillow_heif") is not None


def is_heif(start: bytes) -> bool:
    """Whether an image that begins so is HEIC."""
    return start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS


def open_image(encoded: bytes | memoryview) -> Image.Image:
    """Open an image with those of Pillow's readers that read nothing but pictures, HEIC with pillow-heif."""
    from PIL import Image  # noqa: PLC0415 - most data sets never need it

    formats: tuple[str, ...] = _PILLOW_FORMATS
    if is_heif(bytes(encoded[:12])) and heif_installed():
        importlib.import_module("pillow_heif").register_heif_opener()
        formats = (*formats, "HEIF")
    return Image.open(io.BytesIO(encoded), formats=formats)


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, 1 (upright) where it has none; Pillow turns TIFFs itself."""
    orientation: int = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION, 1)
    return orientation


class UnknownColors(Exception):
    """An image whose pixels cannot be shown in RGB; the message says why."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to 8-bit RGB; of 16-bit gray the higher 8 bits count, as for Pillow's 16-bit colors."""
    from PIL import Image  # noqa: PLC0415 - most data sets never need it

    # Pillow itself would cut off everything above 255, and most of the picture would be white. Some of its versions
    # read 16 bits of these formats, which have no more, as 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UnknownColors("its pixels are 32-bit numbers on no known scale; write it with 8 or 16 bits")
    return image.convert("RGB")


class _Short(Exception):
    """The image ends before its header does."""


class _Content:
    """The bytes of an image, of which only the first are in memory."""

    def __init__(self, start: bytes, read_more: ReadMore | None) -> None:
        self.start = start
        self.read_more = read_more

    def at(self, offset: int, count: int) -> bytes:
        """Exactly these bytes."""
        content = self.up_to(offset, count)
        if len(content) < count:
            raise _Short
        return content

    def up_to(self, offset: int, count: int) -> bytes:
        """These bytes, fewer where the image ends."""
        if offset + count > len(self.start) and self.read_more is not None:
            return self.read_more(offset, count)
        return self.start[offset : offset + count]


def _big(digits: bytes) -> int:
    return int.from_bytes(digits, "big")


def _little(digits: bytes) -> int:
    return int.from_bytes(digits, "little")


def _jpeg(content: _Content) -> ImageHeader:
    """Walk from segment to segment up to the frame header; EXIF data comes before it.

    A segment is a marker (0xFF and a byte that says its kind), two bytes with the length of the rest, themselves
    included, and the rest.
    """
    offset, turned = 2, Flag(0)
    for _ in range(_MOST_SEGMENTS):
        marker = _big(content.at(offset, 2))
        if marker < 0xFF01 or marker == 0xFFFF:  # fill bytes, or stray ones, which every decoder skips
            offset = _next_marker(content, offset + 1)
            continue
        kind = marker & 0xFF
        if kind in (0xD9, 0xDA):  # the end, or pixels, without a frame header
            return _UNREADABLE
        if kind == 0x01 or 0xD0 <= kind <= 0xD8:  # markers that stand alone
            offset += 2
            continue
        length = _big(content.at(offset + 2, 2))
        if length < 2:
            return _UNREADABLE
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # these three are tables, not frames
            return _frame(kind, content.at(offset + 4, 6), turned)
        if kind == 0xE1 and content.up_to(offset + 4, 6) == b"Exif\0\0":
            turned = _turned(content.up_to(offset + 10, length - 8))
        offset += 2 + length
    return _UNREADABLE


def _next_marker(content: _Content, offset: int) -> int:
    """The offset of the next byte that a marker may begin with."""
    while offset < _MOST_BYTES and (chunk := content.up_to(offset, HEADER_BYTES)):
        if (ahead := chunk.find(b"\xff")) >= 0:
            return offset + ahead
        offset += len(chunk)
    raise _Short


def _frame(kind: int, body: bytes, turned: Flag) -> ImageHeader:
    """The size, and whether the fast decoder reads it: four components, 12 bits and arithmetic coding are Pillow's."""
    precision, height, width, components = body[0], _big(body[1:3]), _big(body[3:5]), body[5]
    flags = turned
    if kind <= 0xC2 and precision == 8 and components in (1, 3):
        flags |= Flag.JPEG if kind == 0xC2 else Flag.JPEG | Flag.SEQUENTIAL  # 0xC2 is a progressive frame
    return ImageHeader(width, height, flags)


def _turned(exif: bytes) -> Flag:
    """Whether the first directory of EXIF data gives an orientation other than upright.

    EXIF data is a TIFF header: byte order, the offset of the directory, and there a count of entries of 12 bytes: tag
    (2), type (2), count (4), value (4).
    """
    integer_of = {b"II*\0": _little, b"MM\0*": _big}.get(exif[:4])
    if integer_of is None:
        return Flag(0)

    def integer(offset: int, count: int) -> int:
        return integer_of(exif[offset : offset + count])

    directory = integer(4, 4)
    for entry in range(min(integer(directory, 2), len(exif) // 12)):
        offset = directory + 2 + 12 * entry
        if integer(offset, 2) == ORIENTATION and offset + 10 <= len(exif):
            return _flags_of(integer(offset + 8, 2))
    return Flag(0)


def _flags_of(orientation: int) -> Flag:
    """Of the eight orientations the first is upright, and the last four lie on their side."""
    if orientation not in range(2, 9):
        return Flag(0)
    return Flag.TURNED | Flag.ACROSS if orientation > 4 else Flag.TURNED


def _png(content: _Content) -> ImageHeader:
    """The first chunk (after 8 bytes of signature) holds the size; EXIF data may follow before the pixels.

    A chunk is 4 bytes of length, 4 of kind, the content, and 4 of checksum; the first one ends at byte 33.
    """
    if content.at(12, 4) != b"IHDR":
        return _UNREADABLE
    width, height = _big(content.at(16, 4)), _big(content.at(20, 4))
    offset = 33
    for _ in range(_MOST_SEGMENTS):
        head = content.up_to(offset, 8)
        if len(head) < 8 or head[4:] in (b"IDAT", b"IEND"):
            break
        if head[4:] == b"eXIf":
            exif = content.up_to(offset + 8, min(_big(head[:4]), 1 << 16))
            return ImageHeader(width, height, _turned(exif))
        offset += 12 + _big(head[:4])
    return ImageHeader(width, height, Flag(0))


def _other(content: _Content) -> ImageHeader:
    """Let Pillow read it: the first frame of a GIF, for one, may be larger than its header says."""
    if not content.start:
        return _UNREADABLE
    try:
        with open_image(content.up_to(0, _MOST_BYTES)) as image:
            return ImageHeader(image.width, image.height, _flags_of(exif_orientation(image)))
    except Exception:  # noqa: BLE001 - a damaged file makes Pillow's many readers raise anything
        return _UNREADABLE
