"""JPEGs in restart tiles: the bytes under a crop are cut out as a small JPEG, and the rest is never decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SEQUENTIAL = (0xC0, 0xC1)
_FRAMES = tuple(sorted({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}))
_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_TITLE = b"paceline"
_LONGEST = 0xFFFF - 2 - len(_TITLE)
"""The most bytes that fit into one segment beside its title."""
_WANTED = 48
_NARROWEST, _WIDEST = 24, 128
"""Pixels across a tile: narrow tiles cost bytes, wide ones cost decoding outside of the crop."""
_MOST_PIXELS = 1 << 26
"""Transcoding holds all coefficients of an image in memory: 6 bytes for each pixel."""


@dataclass(frozen=True)
class JpegLayout:
    """What the header of a JPEG says; a unit (MCU) is the smallest piece that is coded on its own."""

    frame: int
    """Offset of the frame header (SOF)."""
    kind: int
    """Its second byte: 0xC0 and 0xC1 are sequential, 0xC2 progressive, all with Huffman codes."""
    data: int
    """Offset of the coded pixels."""
    precision: int
    height: int
    width: int
    components: int
    unit_height: int
    unit_width: int
    interval: int
    """Units between two restart markers; 0 where there are none."""
    lengths: tuple[int, int]
    """Start and end of the segment of Paceline's own that holds the length of every tile; zeros where there is none."""
    exif: tuple[int, int]
    """Start and end of the segment with EXIF data; zeros where there is none."""

    @property
    def rows(self) -> int:
        """Rows of units."""
        return -(-self.height // self.unit_height)

    @property
    def columns(self) -> int:
        """Units in a row."""
        return -(-self.width // self.unit_width)

    @property
    def tiled(self) -> bool:
        """Whether a row of units is a whole number of tiles, so that tiles can be cut out."""
        return self.kind in _SEQUENTIAL and self.interval > 0 and self.columns % self.interval == 0


def read_layout(encoded: bytes | memoryview) -> JpegLayout:
    """Read the layout of a JPEG; ValueError where its header makes no sense."""
    try:
        return _layout(encoded)
    except IndexError:
        raise ValueError("the header is cut off") from None


def _segments(encoded: bytes | memoryview) -> dict[int, int]:
    """The offset of the first segment of each kind, up to that of the first scan."""
    if encoded[0] != 0xFF or encoded[1] != 0xD8:
        raise ValueError("this is not a JPEG")
    offsets: dict[int, int] = {}
    offset, kind = 2, 0
    while kind != 0xDA:
        if encoded[offset] != 0xFF:
            raise ValueError(f"there is no marker at byte {offset}")
        kind = encoded[offset + 1]
        if kind == 0xFF:  # a marker may follow any number of fill bytes
            offset += 1
        elif kind in _STANDALONE:
            offset += 2
        else:
            offsets.setdefault(kind, offset)
            offset += 2 + (encoded[offset + 2] << 8 | encoded[offset + 3])
    return offsets


def _layout(encoded: bytes | memoryview) -> JpegLayout:
    offsets = _segments(encoded)
    frame = next((offsets[kind] for kind in _FRAMES if kind in offsets), 0)
    if not frame:
        raise ValueError("there is no frame header")

    def span(kind: int, title: bytes) -> tuple[int, int]:
        """Start and end of a segment that begins with this title."""
        start = offsets.get(kind, 0)
        if not start or encoded[start + 4 : start + 4 + len(title)] != title:
            return 0, 0
        return start, start + 2 + (encoded[start + 2] << 8 | encoded[start + 3])

    data = span(0xDA, b"")[1]
    restart = offsets.get(0xDD, 0)
    interval = encoded[restart + 4] << 8 | encoded[restart + 5] if restart else 0
    components = encoded[frame + 9]
    if components == 1:  # a lone component is coded block by block, whatever its sampling says
        down, across = 1, 1
    else:
        sampling = [encoded[frame + 11 + 3 * component] for component in range(components)]
        down, across = max(byte & 15 for byte in sampling), max(byte >> 4 for byte in sampling)
    height = encoded[frame + 5] << 8 | encoded[frame + 6]
    width = encoded[frame + 7] << 8 | encoded[frame + 8]
    if not (height and width and down and across):
        raise ValueError("the header gives no size")
    return JpegLayout(
        frame, encoded[frame + 1], data, encoded[frame + 4], height, width, components, 8 * down, 8 * across,
        interval, span(0xE9, _TITLE), span(0xE1, b"Exif\0\0"),
    )  # fmt: skip


def cut_tiles(
    encoded: bytes | memoryview, width: int, height: int, box: Sequence[float] | NDArray[np.generic]
) -> tuple[bytes, int, int]:
    """Cut out a small JPEG that covers a box (top, left, height, width); returns it and its top and left pixel.

    Its pixels in the box are those of the whole image, bit for bit. ValueError means that the bytes are not what a
    pack holds; decoding the whole image may still work.
    """
    layout = read_layout(encoded)
    if not layout.tiled or (layout.width, layout.height) != (width, height):
        raise ValueError("this is not a tiled JPEG of that size")
    across = layout.columns // layout.interval
    tile_width = layout.interval * layout.unit_width
    upper, left, tall, wide = (float(edge) for edge in box)
    first_row, last_row = _covered(upper, tall, height, layout.unit_height, layout.unit_height > 8)
    first, last = _covered(left, wide, width, tile_width, layout.unit_width > 8)
    if (first_row, last_row, first, last) == (0, layout.rows, 0, across):
        return bytes(encoded), 0, 0

    bounds = _bounds(encoded, layout)
    if len(bounds) != layout.rows * across + 1:
        raise ValueError(f"{len(bounds) - 1} tiles instead of {layout.rows * across}")
    # Tiles are stored row by row. Of each row the wanted ones are neighbors, so one slice of bytes per row is enough.
    starts = bounds[first_row * across + first : last_row * across : across]
    ends = bounds[1:].reshape(layout.rows, across)[first_row:last_row, first:last]
    header = encoded[: layout.lengths[0]], encoded[layout.lengths[1] : layout.data]
    pieces = [encoded[a:b] for a, b in zip(starts.tolist(), ends[:, -1].tolist(), strict=True)]
    cut = bytearray().join((*header, *pieces))

    # Restart markers count 0xD0 to 0xD7 from the first tile on: renumber the second byte of the marker behind each tile
    # (the last byte of the tile as it is stored), and put the end marker behind the last one.
    sizes = ends[:, -1] - starts
    moved = starts - (len(header[0]) + len(header[1])) - (np.cumsum(sizes) - sizes)  # by how many bytes each row moved
    markers = (ends - moved[:, None]).reshape(-1) - 1
    np.frombuffer(cut, np.uint8)[markers] = 0xD0 + (np.arange(len(markers)) & 7)
    cut[-2:] = b"\xff\xd9"
    top, side = first_row * layout.unit_height, first * tile_width
    lower, right = min(last_row * layout.unit_height, height), min(last * tile_width, width)
    frame = layout.frame if layout.frame < layout.lengths[0] else layout.frame - (layout.lengths[1] - layout.lengths[0])
    cut[frame + 5 : frame + 9] = ((lower - top) << 16 | (right - side)).to_bytes(4, "big")
    return bytes(cut), top, side


def _covered(start: float, length: float, size: int, step: int, halved: bool) -> tuple[int, int]:
    """The steps that a stretch of pixels reaches from and to.

    Where colors have half the resolution, a margin of one pixel keeps their interpolation right at the edges.
    """
    margin = 1 if halved else 0
    begin = min(max(int(start) - margin, 0), size - 1)
    end = min(max(-int(-(start + length) // 1) + margin, begin + 1), size)
    return begin // step, -(-end // step)


def _bounds(encoded: bytes | memoryview, layout: JpegLayout) -> NDArray[np.int64]:
    """The offset of each tile, and of the end of the last one; the marker behind a tile belongs to it."""
    content = np.frombuffer(encoded, np.uint8)
    start, end = layout.lengths
    if end:
        lengths = content[start + 4 + len(_TITLE) : end].view(">u2")
        bounds = np.empty(len(lengths) + 1, np.int64)
        bounds[0] = layout.data
        np.cumsum(lengths, out=bounds[1:])
        bounds[1:] += layout.data
        if bounds[-1] != len(content):
            raise ValueError("the lengths of the tiles do not add up")
        return bounds
    # Without stored lengths: look for 0xFF followed by 0xD0 to 0xD7.
    markers = (content[layout.data : -1] == 0xFF).nonzero()[0] + layout.data
    markers = markers[(content[1:].take(markers) & 0xF8) == 0xD0]
    return np.concatenate([[layout.data], markers + 2, [len(content)]])


def add_tile_lengths(tiled: bytes, more: bytes = b"") -> bytes:
    """Store the lengths of a JPEG's tiles in its header, so that cutting need not search for them.

    `more` is a segment to insert before them.
    """
    layout = read_layout(tiled)
    lengths = np.diff(_bounds(tiled, layout))
    if lengths.max() <= 0xFFFF and 2 * len(lengths) <= _LONGEST:
        body = _TITLE + lengths.astype(">u2").tobytes()
        more += b"\xff\xe9" + (len(body) + 2).to_bytes(2, "big") + body
    return tiled[: layout.frame] + more + tiled[layout.frame :]


def remove_tile_lengths(tiled: bytes) -> bytes:
    """Remove the lengths of the tiles from a JPEG's header, which only Paceline reads."""
    start, end = read_layout(tiled).lengths
    return tiled[:start] + tiled[end:]


def tile_interval(columns: int, unit_width: int) -> int:
    """How many units make a tile: a divisor of the row, so that no tile is cut short, or the whole row."""
    divisors = [units for units in range(1, columns + 1) if columns % units == 0]
    fitting = [units for units in divisors if _NARROWEST <= units * unit_width <= _WIDEST]
    return min(
        fitting, key=lambda units: max(units * unit_width / _WANTED, _WANTED / (units * unit_width)), default=columns
    )


def retile(encoded: bytes, keep_exif: bool = False) -> bytes | None:
    """Rewrite a JPEG in restart tiles so that it decodes to the same pixels bit for bit; None where that cannot be.

    Of the header only what the pixels need is kept, and EXIF data if asked for. A damaged file may end the process
    (see libjpeg.py), so call this in a worker process.
    """
    from paceline.data.pack import libjpeg  # noqa: PLC0415 - readers of packs need neither libjpeg nor a second decoder

    try:
        layout = read_layout(encoded)
    except ValueError:
        return None
    ordinary = layout.kind in {0xC0, 0xC1, 0xC2} and layout.precision == 8 and layout.components in {1, 3}
    if not ordinary or layout.width * layout.height > _MOST_PIXELS or (keep_exif and not layout.exif[1]):
        return None
    pixels = libjpeg.strict_pixels(encoded)
    if pixels is None:
        return None
    tiled = libjpeg.rewrite(encoded, tile_interval(layout.columns, layout.unit_width))
    if tiled is None:
        return None
    tiled = add_tile_lengths(tiled, encoded[slice(*layout.exif)] if keep_exif else b"")
    again = libjpeg.strict_pixels(tiled)
    return tiled if again is not None and np.array_equal(pixels, again) else None
