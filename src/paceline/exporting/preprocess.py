"""Brings images into the form that an exported network takes, exactly as its evaluation did, with Pillow and NumPy.

    from preprocess import preprocess
    pixels = preprocess("photo.jpg")    # uint8 [side, side, 3]; np.stack several of them for a batch

The numbers come from preprocess.json, which lies beside this file. Run as a program it writes the pixels of each image
that it is given as IMAGE.npy.
"""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112
_TURNS = {
    2: (False, False, True), 3: (False, True, True), 4: (False, True, False), 5: (True, False, False),
    6: (True, False, True), 7: (True, True, True), 8: (True, True, False),
}  # fmt: skip
"""For each EXIF orientation: whether rows and columns are exchanged, and which of them are then reversed."""
_WHOLE_RESIZE = 8
"""The whole image is resized, and cropped afterwards, where that is at most so many times the pixels needed."""


def preprocess(image: str | Path | bytes | Image.Image, settings: dict[str, Any] | None = None) -> np.ndarray[Any, Any]:
    """The pixels [side, side, 3] of an image: turned upright if need be, in RGB, resized and cropped."""
    if settings is None:
        settings = json.loads(Path(__file__).with_name("preprocess.json").read_text())
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    elif not isinstance(image, Image.Image):
        image = Image.open(image)
    orientation = 1
    if settings["orientation"] == "honor" and image.format != "TIFF":  # which Pillow turns itself
        orientation = image.getexif().get(_ORIENTATION, 1)
    pixels = np.asarray(_rgb(image))
    across, rows_reversed, columns_reversed = _TURNS.get(orientation, (False, False, False))
    height, width = (pixels.shape[1], pixels.shape[0]) if across else pixels.shape[:2]
    top, left, tall, wide = _box(settings, height, width)
    # The box is one of the upright image; the image is resized as it is stored, and turned afterwards.
    top = height - top - tall if rows_reversed else top
    left = width - left - wide if columns_reversed else left
    box = (left, top, wide, tall) if across else (top, left, tall, wide)
    small = _resize(pixels, *box, settings["side"], settings["resize"])
    small = small.transpose(1, 0, 2) if across else small
    small = small[::-1] if rows_reversed else small
    return np.ascontiguousarray(small[:, ::-1] if columns_reversed else small)


def _rgb(image: Image.Image) -> Image.Image:
    """The image in 8-bit RGB; of 16-bit gray the higher 8 bits count."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("pixels that are 32-bit numbers are on no known scale; write the image with 8 or 16 bits")
    return image.convert("RGB")


def _box(settings: dict[str, Any], height: int, width: int) -> tuple[float, float, float, float]:
    """Top, left, height and width, in fractional pixels, of what is resized to side x side."""
    side = settings["side"]
    if settings["fraction"] is not None:
        tall, wide = height * settings["fraction"], width * settings["fraction"]
        return (height - tall) / 2, (width - wide) / 2, tall, wide
    short = max(settings["short"], side)
    resized = [short * edge // min(height, width) for edge in (height, width)]
    first = [float(np.rint((edge - side) / 2)) for edge in resized]
    return (
        first[0] * height / resized[0], first[1] * width / resized[1],
        side * height / resized[0], side * width / resized[1],
    )  # fmt: skip


def _resize(
    pixels: np.ndarray[Any, Any], top: float, left: float, tall: float, wide: float, side: int, resize: str
) -> np.ndarray[Any, Any]:
    """What lies in a box, side x side; a box that is a crop of the resized image is cut out of that."""
    height, width = pixels.shape[:2]
    down, across = tall / side, wide / side
    exact = [height / down, width / across, top / down, left / across]
    whole = [round(length) for length in exact]
    fits = whole[0] * whole[1] <= _WHOLE_RESIZE * side * side
    if fits and all(abs(length - near) < 1e-6 for length, near in zip(exact, whole, strict=True)):
        columns = _along(pixels, 1, whole[1], whole[3], side, resize)
        return _along(columns, 0, whole[0], whole[2], side, resize)
    # Pillow takes a box of fractional pixels; it sees only what its filter reaches, as the evaluation did.
    reach = 1 if resize == "bilinear" else 2
    (first, last), (begin, end) = _around(top, tall, height, side, reach), _around(left, wide, width, side, reach)
    part = Image.fromarray(np.ascontiguousarray(pixels[first:last, begin:end]))
    box = (
        max(left - begin, 0.0), max(top - first, 0.0),
        min(left - begin + wide, part.width), min(top - first + tall, part.height),
    )  # fmt: skip
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    return np.asarray(part.resize((side, side), filters[resize], box=box))


def _around(start: float, length: float, size: int, side: int, reach: int) -> tuple[int, int]:
    """The first pixel that a filter sees of a length, and the one behind the last."""
    more = reach * max(length / side, 1) + 1
    return max(math.floor(start - more), 0), min(math.ceil(start + length + more), size)


def _along(
    pixels: np.ndarray[Any, Any], axis: int, size: int, first: int, count: int, resize: str
) -> np.ndarray[Any, Any]:
    """One axis resized to `size` with antialiasing, of which `count` pixels from `first` on are given.

    Weights are integers of 16 bits, as they are in torch, so that every pixel is the same.
    """
    length = pixels.shape[axis]
    if size == length:
        return pixels.take(range(first, first + count), axis)
    weights, starts = _weights(length, size, resize)
    bits = _precision(float(weights.max()))
    scaled = weights * (1 << bits)
    integers = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    result = np.empty((*pixels.shape[:axis], count, *pixels.shape[axis + 1 :]), np.uint8)
    for index in range(count):
        row = integers[first + index]
        window = range(starts[first + index], min(starts[first + index] + len(row), length))
        seen = pixels.take(window, axis).astype(np.int32)
        total = np.tensordot(seen, row[: len(window)], (axis, 0)) + (1 << (bits - 1))
        result[(slice(None),) * axis + (index,)] = np.clip(total >> bits, 0, 255)
    return result


def _weights(length: int, size: int, resize: str) -> tuple[np.ndarray[Any, Any], list[int]]:
    """For each new pixel what each old one counts, and the first old one."""
    scale = length / size
    support = (1.0 if resize == "bilinear" else 2.0) * max(scale, 1.0)
    most = math.ceil(support) * 2 + 1
    weights, starts = np.zeros((size, most)), []
    for index in range(size):
        center = scale * (index + 0.5)
        start = max(int(center - support + 0.5), 0)
        count = min(max(min(int(center + support + 0.5), length) - start, 0), most)
        at = (np.arange(count) + start - center + 0.5) * (1.0 / scale if scale >= 1 else 1.0)
        values = _filter(at, resize)
        total = 0.0
        for value in values.tolist():
            total += value
        weights[index, :count] = values / total if total else values
        starts.append(start)
    return weights, starts


def _filter(at: np.ndarray[Any, Any], resize: str) -> np.ndarray[Any, Any]:
    x = np.abs(at)
    if resize == "bilinear":
        return np.where(x < 1, 1 - x, 0.0)
    a = -0.5
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


def _precision(largest: float) -> int:
    """How many bits behind the point the weights have."""
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


if __name__ == "__main__":
    for name in sys.argv[1:]:
        np.save(f"{name}.npy", preprocess(name))
