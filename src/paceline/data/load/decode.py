"""From the bytes of an encoded image to the pixels that are trained on: decode, cut, resize, turn and mirror.

There are two decoders, and one way to resize for both. The fast one is libjpeg-turbo by way of simplejpeg, and of tiled
files it reads only what lies under the box; Pillow reads everything else, and judges what is damaged.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from paceline.data.index.colors import NoColors, in_colors
from paceline.data.index.image_header import PILLOW_FORMATS
from paceline.data.index.table import Flag
from paceline.numpy_types import UInt8s

if TYPE_CHECKING:
    from PIL import Image

Filter = Literal["bilinear", "bicubic"]
Decoder = Literal["fast", "pillow"]
EncodedBytes = bytes | memoryview
Window = tuple[int, int, int, int]
"""Top, left, height and width in whole pixels."""

MOST_PIXELS = 1 << 27
"""A picture with more is not decoded: a small file may claim to hold any number."""

_BEGINNINGS = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
"""What images begin with, even where the rest of the header is missing."""
_ORIENTATION = 0x0112
_TURNS = {2: (False, False, True), 3: (False, True, True), 4: (False, True, False), 5: (True, False, False),
          6: (True, False, True), 7: (True, True, True), 8: (True, True, False)}  # fmt: skip
"""For each EXIF orientation: whether rows and columns are exchanged, and which of them are then reversed."""
_UPRIGHT = (False, False, False)
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
"""How Python notes that warnings of Pillow are not shown."""
_WHOLE_RESIZE = 8
"""The whole image is resized, and cut afterwards, where that makes at most so many times the pixels that are kept."""


class Undecodable(Exception):
    """These bytes are no picture, for the reason that is said."""


def decode_into(
    encoded: EncodedBytes,
    flags: int,
    width: int,
    height: int,
    box: Sequence[float] | NDArray[Any],
    mirrored: bool,
    resize: Filter,
    out: UInt8s,
    *,
    decoder: Decoder = "fast",
    turn: bool = False,
) -> None:
    """Resize what lies in the box (top, left, height, width) of an image into `out`, which is square.

    A box of whole numbers is cut out before it is resized, as for training; one of floats is a place to look at, and
    the filter sees the pixels around it, as for evaluation. `width` and `height` are those of the index, as they are
    stored; with `turn` the image is turned as EXIF says, and the box is one of the turned image.
    """
    _refuse_unseen(encoded, flags, width, height)
    place: list[Any] = box.tolist() if isinstance(box, np.ndarray) else list(box)
    turns = _UPRIGHT
    if turn and flags & Flag.TURNED:
        turns = _turns_of(encoded)
        place = _turned_back(place, turns, bool(flags & Flag.ACROSS), width, height)
    if isinstance(place[0], int):
        window: Window = (place[0], place[1], place[2], place[3])
        picture = _resize_all(_read(encoded, flags, width, height, window, decoder), resize, (len(out), len(out)))
    else:
        picture = _look_at(encoded, flags, width, height, place, decoder, resize, len(out))
    _write(picture, turns, mirrored, out)


def _refuse_unseen(encoded: EncodedBytes, flags: int, width: int, height: int) -> None:
    """Refuse by the header alone what is not worth, or not safe, to decode."""
    if len(encoded) == 0:
        raise Undecodable("it is empty")
    if flags & Flag.UNREADABLE or width < 1 or height < 1:
        begun = bytes(encoded[:4]).startswith(_BEGINNINGS)
        raise Undecodable(
            f"its {'header is cut short or damaged' if begun else 'first bytes are not those of an image'}"
        )
    if width * height > MOST_PIXELS:
        raise Undecodable(f"it claims {width:,} x {height:,} pixels; up to {MOST_PIXELS:,} are decoded")


def _read(encoded: EncodedBytes, flags: int, width: int, height: int, window: Window, decoder: Decoder) -> UInt8s:
    """The pixels of a window. What one decoder refuses the other one tries, so that they agree on what is damaged."""
    if decoder == "fast" and flags & Flag.JPEG:
        picture = _read_fast(encoded, flags, width, height, window)
        return _read_with_pillow(encoded, width, height, window) if picture is None else picture
    try:
        return _read_with_pillow(encoded, width, height, window)
    except Undecodable:
        picture = _read_fast(encoded, flags, width, height, window) if flags & Flag.JPEG else None
        if picture is None:
            raise
        return picture


def _read_fast(encoded: EncodedBytes, flags: int, width: int, height: int, window: Window) -> UInt8s | None:
    """The pixels of a window by libjpeg-turbo, or None where anything about the file is out of the ordinary."""
    top, left, tall, wide = window
    try:
        import simplejpeg  # noqa: PLC0415 - without it Pillow reads everything

        if flags & Flag.TILED:
            from paceline.data.pack.tiles import cut_tiles  # noqa: PLC0415 - only packs have tiles

            encoded, first_row, first_column = cut_tiles(encoded, width, height, window)
            top, left = top - first_row, left - first_column
        elif simplejpeg.decode_jpeg_header(encoded)[:2] != (height, width):
            return None
        decoded: UInt8s = simplejpeg.decode_jpeg(encoded, "RGB")
    except Exception:  # noqa: BLE001 - Pillow judges, whatever is wrong with it
        return None
    picture = decoded[top : top + tall, left : left + wide]
    return picture if picture.shape == (tall, wide, 3) else None


def _read_with_pillow(encoded: EncodedBytes, width: int, height: int, window: Window) -> UInt8s:
    """The pixels of a window by Pillow, which decodes the whole file and finds every damage."""
    top, left, tall, wide = window
    with _opened(encoded) as image:
        if image.size != (width, height):
            found = f"{image.width:,} x {image.height:,}"
            raise Undecodable(f"it is {found} pixels, and was {width:,} x {height:,} when it was indexed")
        try:
            if image.mode == "RGB":
                image.load()
            colors = image if image.mode == "RGB" else in_colors(image)
            return np.array(colors.crop((left, top, left + wide, top + tall)))
        except NoColors as fault:
            raise Undecodable(str(fault)) from None
        except Exception as fault:  # noqa: BLE001 - its many readers raise anything
            raise Undecodable(f"Pillow cannot decode it: {str(fault) or type(fault).__name__}") from None


def _opened(encoded: EncodedBytes) -> Image.Image:
    """The image with its header read by Pillow, whose warnings are for programmers."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - most data sets never need it

    if warnings.filters[:1] != [_QUIET]:
        # Warnings are settings of the process; to set them back after each image would not be safe among threads.
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        return Image.open(io.BytesIO(encoded), formats=PILLOW_FORMATS)
    except UnidentifiedImageError:
        raise Undecodable("it is no image that Pillow knows, or its header is damaged") from None
    except Exception as fault:  # noqa: BLE001 - its many readers raise anything
        raise Undecodable(f"Pillow cannot read it: {str(fault) or type(fault).__name__}") from None


def _turns_of(encoded: EncodedBytes) -> tuple[bool, bool, bool]:
    """Whether rows and columns are exchanged, and which are then reversed, to see the image upright."""
    with _opened(encoded) as image:
        if image.format == "TIFF":  # which Pillow turns itself, and older packs call turned
            return _UPRIGHT
        try:
            return _TURNS.get(image.getexif().get(_ORIENTATION, 1), _UPRIGHT)
        except Exception:  # noqa: BLE001 - damaged EXIF data says nothing, and the pixels may be good
            return _UPRIGHT


def _turned_back(place: list[Any], turns: tuple[bool, bool, bool], across: bool, width: int, height: int) -> list[Any]:
    """A box of the turned image as one of the stored image."""
    exchanged, rows_reversed, columns_reversed = turns
    top, left, tall, wide = place
    if across != exchanged:  # drawn for the other size: any box inside the image is better than one outside
        top, left, tall, wide = left, top, wide, tall
    turned_height, turned_width = (width, height) if exchanged else (height, width)
    if rows_reversed:
        top = turned_height - top - tall
    if columns_reversed:
        left = turned_width - left - wide
    return [left, top, wide, tall] if exchanged else [top, left, tall, wide]


def _resize_all(picture: UInt8s, resize: Filter, size: tuple[int, int]) -> UInt8s:
    """A whole picture in another height and width."""
    if picture.shape[:2] == size:
        return picture
    # Copied here, as torch would copy it on several threads. In this order of axes, and with the strides that reshape
    # gives the batch of one, torch sees that colors lie together, and takes its quick way.
    height, width = picture.shape[:2]
    pixels = np.ascontiguousarray(picture).reshape(1, height, width, 3).transpose(0, 3, 1, 2)
    made = interpolate(torch.from_numpy(pixels), size, mode=resize, antialias=True).numpy()
    colors_last: UInt8s = made[0].transpose(1, 2, 0)
    return colors_last


def _look_at(
    encoded: EncodedBytes,
    flags: int,
    width: int,
    height: int,
    place: list[float],
    decoder: Decoder,
    resize: Filter,
    side: int,
) -> UInt8s:
    """What a fractional box shows."""
    down, across = place[2] / side, place[3] / side
    # Resize and center crop are a cut of the whole image, resized, where all of these are whole numbers.
    cut = [height / down, width / across, place[0] / down, place[1] / across]
    tall, wide, top, left = (round(number) for number in cut)
    whole = all(abs(number - round(number)) < 1e-6 for number in cut) and tall * wide <= _WHOLE_RESIZE * side * side
    window: Window = (0, 0, height, width)
    if not whole or flags & Flag.TILED:
        window = _around(place, (1 if resize == "bilinear" else 2), side, width, height)
    picture = _read(encoded, flags, width, height, window, decoder)
    if not whole:
        return _resize_part(picture, [place[0] - window[0], place[1] - window[1], *place[2:]], resize, side)
    if picture.shape[:2] != (height, width):
        seen, picture = picture, np.zeros((height, width, 3), np.uint8)  # the zeros reach no pixel that is kept
        picture[window[0] : window[0] + window[2], window[1] : window[1] + window[3]] = seen
    return _resize_all(picture, resize, (tall, wide))[top : top + side, left : left + side]


def _around(place: list[float], support: int, side: int, width: int, height: int) -> Window:
    """The window of whole pixels that a filter sees of a box."""
    edges = []
    for start, length, size in zip(place[:2], place[2:], (height, width), strict=True):
        reach = support * max(length / side, 1) + 1
        first = max(math.floor(start - reach), 0)
        edges.append((first, min(math.ceil(start + length + reach), size) - first))
    return edges[0][0], edges[1][0], edges[0][1], edges[1][1]


def _resize_part(picture: UInt8s, place: list[float], resize: Filter, side: int) -> UInt8s:
    """A fractional box of a picture by Pillow, the only one that takes it."""
    from PIL import Image  # noqa: PLC0415 - common boxes need no Pillow

    height, width = picture.shape[:2]
    top, left = max(place[0], 0.0), max(place[1], 0.0)
    edges = left, top, min(place[1] + place[3], width), min(place[0] + place[2], height)
    image = Image.frombuffer("RGB", (width, height), np.ascontiguousarray(picture), "raw", "RGB", 0, 1)
    resampling = Image.Resampling.BILINEAR if resize == "bilinear" else Image.Resampling.BICUBIC
    return np.asarray(image.resize((side, side), resampling, box=edges))


def _write(picture: UInt8s, turns: tuple[bool, bool, bool], mirrored: bool, out: UInt8s) -> None:
    """Turn and mirror the finished picture into its place: the fewest pixels that there are to move."""
    exchanged, rows_reversed, columns_reversed = turns
    if exchanged:
        picture = picture.transpose(1, 0, 2)
    if rows_reversed:
        picture = picture[::-1]
    if mirrored != columns_reversed:
        for color in range(3):  # five times as fast as pixel by pixel, and without torch's threads
            out[:, :, color] = picture[:, ::-1, color]
    else:
        out[...] = picture
