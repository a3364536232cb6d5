"""From the bytes of an encoded image to the pixels that are trained on: decode, crop, resize, turn and flip.

There are two decoders, and one way to resize for both. The fast one is libjpeg-turbo through simplejpeg, and of tiled
files it reads only what lies under the box; Pillow reads everything else, and decides what is damaged.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from paceline.data.index.image_header import (
    UnknownColors,
    exif_orientation,
    heif_installed,
    is_heif,
    open_image,
    to_rgb,
)
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
"""An image with more is not decoded: a small file may claim to hold any number."""

_BEGINNINGS = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
"""What images begin with, even where the rest of the header is missing."""
_TURNS = {2: (False, False, True), 3: (False, True, True), 4: (False, True, False), 5: (True, False, False),
          6: (True, False, True), 7: (True, True, True), 8: (True, True, False)}  # fmt: skip
"""For each EXIF orientation: whether rows and columns are exchanged, and which of them are then reversed."""
_UPRIGHT = (False, False, False)
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
"""How Python stores that warnings of Pillow are not shown."""
_WHOLE_RESIZE = 8
"""The whole image is resized, and cropped afterwards, where that is at most so many times the pixels needed."""


class Undecodable(Exception):
    """These bytes cannot be decoded, for the reason in the message."""


def decode_into(
    encoded: EncodedBytes,
    flags: int,
    width: int,
    height: int,
    box: Sequence[float] | NDArray[Any],
    flipped: bool,
    resize: Filter,
    out: UInt8s,
    *,
    decoder: Decoder = "fast",
    turn: bool = False,
) -> None:
    """Resize what lies in the box (top, left, height, width) of an image into `out`, which is square.

    A box of integers is cropped before it is resized, as for training; around one of floats the filter also sees the
    neighboring pixels, as for evaluation. `width` and `height` are those of the index, as they are stored; with `turn`
    the image is turned as EXIF says, and the box is one of the turned image.
    """
    _refuse_unseen(encoded, flags, width, height)
    edges: list[Any] = box.tolist() if isinstance(box, np.ndarray) else list(box)
    turns = _UPRIGHT
    if turn and flags & Flag.TURNED:
        turns = _turns_of(encoded)
        edges = _turned_back(edges, turns, bool(flags & Flag.ACROSS), width, height)
    if isinstance(edges[0], int):
        window: Window = (edges[0], edges[1], edges[2], edges[3])
        pixels = _resize_all(_read(encoded, flags, width, height, window, decoder), resize, (len(out), len(out)))
    else:
        pixels = _resize_around(encoded, flags, width, height, edges, decoder, resize, len(out))
    _write(pixels, turns, flipped, out)


def _refuse_unseen(encoded: EncodedBytes, flags: int, width: int, height: int) -> None:
    """Refuse by the header alone what is not worth, or not safe, to decode."""
    if len(encoded) == 0:
        raise Undecodable("it is empty")
    if flags & Flag.UNREADABLE or width < 1 or height < 1:
        if is_heif(bytes(encoded[:12])) and not heif_installed():
            raise Undecodable("it is HEIC, which needs pillow-heif; write pip install pillow-heif")
        begun = bytes(encoded[:4]).startswith(_BEGINNINGS)
        raise Undecodable(
            f"its {'header is cut short or damaged' if begun else 'first bytes are not those of an image'}"
        )
    if width * height > MOST_PIXELS:
        raise Undecodable(f"it claims {width:,} x {height:,} pixels; up to {MOST_PIXELS:,} are decoded")


def _read(encoded: EncodedBytes, flags: int, width: int, height: int, window: Window, decoder: Decoder) -> UInt8s:
    """The pixels of a window. What one decoder refuses the other one tries, so that they agree on what is damaged."""
    if decoder == "fast" and flags & Flag.JPEG:
        pixels = _read_fast(encoded, flags, width, height, window)
        return _read_with_pillow(encoded, width, height, window) if pixels is None else pixels
    try:
        return _read_with_pillow(encoded, width, height, window)
    except Undecodable:
        pixels = _read_fast(encoded, flags, width, height, window) if flags & Flag.JPEG else None
        if pixels is None:
            raise
        return pixels


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
    pixels = decoded[top : top + tall, left : left + wide]
    return pixels if pixels.shape == (tall, wide, 3) else None


def _read_with_pillow(encoded: EncodedBytes, width: int, height: int, window: Window) -> UInt8s:
    """The pixels of a window by Pillow, which decodes the whole file and finds every damage."""
    top, left, tall, wide = window
    with _opened(encoded) as image:
        if image.size != (width, height):
            size = f"{image.width:,} x {image.height:,}"
            raise Undecodable(f"it is {size} pixels, and was {width:,} x {height:,} when it was indexed")
        try:
            if image.mode == "RGB":
                image.load()
            colors = image if image.mode == "RGB" else to_rgb(image)
            return np.array(colors.crop((left, top, left + wide, top + tall)))
        except UnknownColors as fault:
            raise Undecodable(str(fault)) from None
        except Exception as fault:  # noqa: BLE001 - its many readers raise anything
            raise Undecodable(f"Pillow cannot decode it: {str(fault) or type(fault).__name__}") from None


def _opened(encoded: EncodedBytes) -> Image.Image:
    """The image with its header read by Pillow, whose warnings are for programmers."""
    from PIL import UnidentifiedImageError  # noqa: PLC0415 - most data sets never need it

    if warnings.filters[:1] != [_QUIET]:
        # Warnings are settings of the process; to set them back after each image would not be safe among threads.
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        return open_image(encoded)
    except UnidentifiedImageError:
        raise Undecodable("it is no image that Pillow knows, or its header is damaged") from None
    except Exception as fault:  # noqa: BLE001 - its many readers raise anything
        raise Undecodable(f"Pillow cannot read it: {str(fault) or type(fault).__name__}") from None


def _turns_of(encoded: EncodedBytes) -> tuple[bool, bool, bool]:
    """Whether rows and columns are exchanged, and which are then reversed, to see the image upright."""
    with _opened(encoded) as image:
        try:
            return _TURNS.get(exif_orientation(image), _UPRIGHT)
        except Exception:  # noqa: BLE001 - damaged EXIF data says nothing, and the pixels may be good
            return _UPRIGHT


def _turned_back(box: list[Any], turns: tuple[bool, bool, bool], across: bool, width: int, height: int) -> list[Any]:
    """A box of the turned image as one of the stored image."""
    exchanged, rows_reversed, columns_reversed = turns
    top, left, tall, wide = box
    if across != exchanged:  # drawn for the other size: any box inside the image is better than one outside
        top, left, tall, wide = left, top, wide, tall
    turned_height, turned_width = (width, height) if exchanged else (height, width)
    if rows_reversed:
        top = turned_height - top - tall
    if columns_reversed:
        left = turned_width - left - wide
    return [left, top, wide, tall] if exchanged else [top, left, tall, wide]


def _resize_all(pixels: UInt8s, resize: Filter, size: tuple[int, int]) -> UInt8s:
    """A whole image in another height and width."""
    if pixels.shape[:2] == size:
        return pixels
    # Copied here, as torch would copy it on several threads. In this order of axes, and with the strides that reshape
    # gives the batch of one, torch sees that colors lie together, and takes its quick way.
    height, width = pixels.shape[:2]
    batch = np.ascontiguousarray(pixels).reshape(1, height, width, 3).transpose(0, 3, 1, 2)
    resized = interpolate(torch.from_numpy(batch), size, mode=resize, antialias=True).numpy()
    colors_last: UInt8s = resized[0].transpose(1, 2, 0)
    return colors_last


def _resize_around(
    encoded: EncodedBytes,
    flags: int,
    width: int,
    height: int,
    box: list[float],
    decoder: Decoder,
    resize: Filter,
    side: int,
) -> UInt8s:
    """What lies in a fractional box, resized."""
    down, across = box[2] / side, box[3] / side
    # Where all of these are integers, the box is a crop of the resized image, as Resize and CenterCrop give it.
    exact = [height / down, width / across, box[0] / down, box[1] / across]
    tall, wide, top, left = (round(length) for length in exact)
    whole = all(abs(length - round(length)) < 1e-6 for length in exact) and tall * wide <= _WHOLE_RESIZE * side * side
    window: Window = (0, 0, height, width)
    if not whole or flags & Flag.TILED:
        window = _around(box, (1 if resize == "bilinear" else 2), side, width, height)
    pixels = _read(encoded, flags, width, height, window, decoder)
    if not whole:
        return _resize_part(pixels, [box[0] - window[0], box[1] - window[1], *box[2:]], resize, side)
    if pixels.shape[:2] != (height, width):
        seen, pixels = pixels, np.zeros((height, width, 3), np.uint8)  # the zeros reach no pixel that is used
        pixels[window[0] : window[0] + window[2], window[1] : window[1] + window[3]] = seen
    return _resize_all(pixels, resize, (tall, wide))[top : top + side, left : left + side]


def _around(box: list[float], support: int, side: int, width: int, height: int) -> Window:
    """The window of whole pixels that a filter sees of a box."""
    edges = []
    for start, length, size in zip(box[:2], box[2:], (height, width), strict=True):
        reach = support * max(length / side, 1) + 1
        first = max(math.floor(start - reach), 0)
        edges.append((first, min(math.ceil(start + length + reach), size) - first))
    return edges[0][0], edges[1][0], edges[0][1], edges[1][1]


def _resize_part(pixels: UInt8s, box: list[float], resize: Filter, side: int) -> UInt8s:
    """A fractional box of an image by Pillow, the only library that takes one."""
    from PIL import Image  # noqa: PLC0415 - common boxes need no Pillow

    height, width = pixels.shape[:2]
    top, left = max(box[0], 0.0), max(box[1], 0.0)
    edges = left, top, min(box[1] + box[3], width), min(box[0] + box[2], height)
    image = Image.frombuffer("RGB", (width, height), np.ascontiguousarray(pixels), "raw", "RGB", 0, 1)
    resampling = Image.Resampling.BILINEAR if resize == "bilinear" else Image.Resampling.BICUBIC
    return np.asarray(image.resize((side, side), resampling, box=edges))


def _write(pixels: UInt8s, turns: tuple[bool, bool, bool], flipped: bool, out: UInt8s) -> None:
    """Turn and flip the finished image into `out`, last, when there are the fewest pixels to move."""
    exchanged, rows_reversed, columns_reversed = turns
    if exchanged:
        pixels = pixels.transpose(1, 0, 2)
    if rows_reversed:
        pixels = pixels[::-1]
    if flipped != columns_reversed:
        for color in range(3):  # five times as fast as pixel by pixel, and without torch's threads
            out[:, :, color] = pixels[:, ::-1, color]
    else:
        out[...] = pixels
