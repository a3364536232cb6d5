"""Which box of an image in a file is resized: a random one for training, the usual center for evaluation.

Every operation here is exact by IEEE 754 (the exponential too, which is why it is written out), so a box depends on the
seed, the position and the image's size, never on the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.numpy_types import Bools, Float64s, Int64s
from paceline.settings.augment import Crop
from paceline.settings.data import Center, Squash

TRIES_AT_ONCE = 16
"""At most so many boxes of one image are drawn together: most images take the first."""


def training_boxes(
    seed: int,
    crop: Crop,
    positions: Int64s,
    widths: Int64s,
    heights: Int64s,
    rows: NDArray[Any] | None = None,
    objects: NDArray[np.float32] | None = None,
) -> Int64s:
    """For each position of the endless list, top, left, height and width (pixels) of the box that is resized.

    `rows` are the index rows of the images at these positions, and `objects` their table's objects; both are needed
    only where the crop has an `object_fraction`.
    """
    key = keyed.key(seed, "crop box")
    positions = np.asarray(positions, np.int64)
    widths, heights = (np.maximum(np.asarray(sizes, np.int64), 1) for sizes in (widths, heights))
    boxes = _fallback(crop, widths, heights)
    remaining, tried, together = np.arange(len(positions)), 0, 1
    draw = _torch_boxes if crop.distribution == "logarithmic" else _tensorflow_boxes
    while len(remaining) and tried < crop.tries:
        tries = np.arange(tried, min(tried + together, crop.tries))
        words = keyed.words(key, positions[remaining, None], tries)
        drawn, valid = draw(crop, words, widths[remaining, None], heights[remaining, None])
        if crop.object_fraction > 0 and rows is not None and objects is not None:
            covers = (crop.object_fraction, drawn, rows[remaining], objects, widths[remaining], heights[remaining])
            valid &= _cover_objects(*covers)
        done = valid.any(axis=1)
        boxes[remaining[done]] = drawn[:, done, valid.argmax(axis=1)[done]].T
        remaining, tried, together = remaining[~done], tried + len(tries), min(4 * together, TRIES_AT_ONCE)
    return boxes


def evaluation_boxes(how: Center | Squash, side: int, widths: Int64s, heights: Int64s) -> Float64s:
    """For each image, top, left, height and width (fractional pixels) of what is resized to `side` x `side`.

    A center is what torchvision's Resize(short) and CenterCrop(side) show, with their rounding. Where `short` is less
    than `side` they would add a black border; here the whole shorter edge is shown.
    """
    sizes = np.maximum(np.stack([heights, widths]).astype(np.int64), 1)
    if isinstance(how, Squash):
        length = sizes * how.fraction
        return np.concatenate([(sizes - length) / 2, length]).T
    short = max(how.shorter(side), side)
    resized = short * sizes // sizes.min(axis=0)
    first = np.rint((resized - side) / 2)
    return np.concatenate([first * sizes / resized, side * sizes / resized]).T


def _torch_boxes(crop: Crop, words: keyed.Words[Int64s], widths: Int64s, heights: Int64s) -> tuple[Int64s, Bools]:
    """torchvision's RandomResizedCrop: any area, each doubling of the aspect as likely; and whether each box fits."""
    size, shape, down, right = words
    low, high = crop.area
    area = (low + (high - low) * (size * 2.0**-32)) * (widths * heights)
    # The library's logarithm may err in its last bit, and not everywhere alike: round that bit away.
    shortest, longest = (round(math.log(aspect) * 2.0**40) * 2.0**-40 for aspect in crop.aspect)
    aspect = _exponential(shortest + (longest - shortest) * (shape.astype(np.float64) * 2.0**-32))
    width, height = (np.rint(np.sqrt(edge)).astype(np.int64) for edge in (area * aspect, area / aspect))
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    return _placed(width, height, down, right, widths, heights), fits


def _tensorflow_boxes(crop: Crop, words: keyed.Words[Int64s], widths: Int64s, heights: Int64s) -> tuple[Int64s, Bools]:
    """TensorFlow's sample_distorted_bounding_box: any aspect, then any height that the areas allow."""
    size, shape, down, right = words
    aspect = crop.aspect[0] + (crop.aspect[1] - crop.aspect[0]) * (shape * 2.0**-32)
    least, most = (fraction * (widths * heights) for fraction in crop.area)
    shortest, tallest = (np.rint(np.sqrt(area / aspect)) for area in (least, most))
    # As tall as still rounds to no more than the image's width.
    tallest = np.where(np.rint(tallest * aspect) > widths, np.floor((widths + 0.5 - 1e-7) / aspect), tallest)
    tallest = np.minimum(tallest - (np.rint(tallest * aspect) > widths), heights).astype(np.int64)
    shortest = np.minimum(shortest, tallest).astype(np.int64)
    height = shortest + (size * (tallest - shortest + 1) >> 32)
    # Rounding may have left the allowed areas by a row: take the row back.
    height = height + (height * np.rint(height * aspect) < least)
    height = height - (height * np.rint(height * aspect) > most)
    width = np.rint(height * aspect).astype(np.int64)
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    fits &= (height * width >= least) & (height * width <= most)
    return _placed(width, height, down, right, widths, heights), fits


def _placed(width: Int64s, height: Int64s, down: Int64s, right: Int64s, widths: Int64s, heights: Int64s) -> Int64s:
    """Boxes anywhere in the image; those too large for it start at its corner, and will not be used."""
    top = down * (np.maximum(heights - height, 0) + 1) >> 32
    left = right * (np.maximum(widths - width, 0) + 1) >> 32
    return np.stack([top, left, height, width])


def _fallback(crop: Crop, widths: Int64s, heights: Int64s) -> Int64s:
    """The box after the last try: the whole image, or as much of its center as the aspects allow."""
    height, width = heights, widths
    if crop.otherwise == "center":
        narrowest, widest = crop.aspect
        height = np.minimum(heights, np.maximum(np.rint(widths / narrowest), 1)).astype(np.int64)
        width = np.minimum(widths, np.maximum(np.rint(heights * widest), 1)).astype(np.int64)
        # Only the edge that is too long is cut: an image within the aspects, up to rounding, stays whole.
        height = np.where(widths < narrowest * heights, height, heights)
        width = np.where(widths > widest * heights, width, widths)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)


def _cover_objects(
    fraction: float, drawn: Int64s, rows: NDArray[Any], objects: NDArray[np.float32], widths: Int64s, heights: Int64s
) -> Bools:
    """Whether each box covers this fraction of one of its image's objects; true where the image has none."""
    counts = rows["objects"].astype(np.int64)
    owner = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    edges = np.clip(objects[rows["first_object"].astype(np.int64)[owner] + within].astype(np.float64), 0, 1)
    # A fraction of 24 bits times a number of pixels is exact.
    top, bottom = (edges[:, edge, None] * heights[owner, None] for edge in (0, 2))
    left, right = (edges[:, edge, None] * widths[owner, None] for edge in (1, 3))
    area = np.maximum(bottom - top, 0) * np.maximum(right - left, 0)
    box_top, box_left, box_height, box_width = drawn[:, owner]
    shared_height = np.minimum(bottom, box_top + box_height) - np.maximum(top, box_top)
    shared_width = np.minimum(right, box_left + box_width) - np.maximum(left, box_left)
    shared_area = np.maximum(shared_height, 0) * np.maximum(shared_width, 0)
    real = area[:, 0] > 0
    covers = np.zeros(drawn.shape[1:], np.bool_)
    covers[np.setdiff1d(np.arange(len(rows)), owner[real])] = True
    np.logical_or.at(covers, owner[real], (shared_area >= fraction * area)[real])
    return covers


def _exponential(x: Float64s) -> Float64s:
    """e to the power of x: a power of two, times the series on the remainder (|remainder| < 0.35, good to 1e-15)."""
    doublings = np.rint(x * (1 / math.log(2)))
    remainder = x - doublings * 0.693147180559945309
    value = np.ones_like(remainder)
    for k in range(14, 0, -1):
        value = 1 + value * remainder / k
    return np.ldexp(value, doublings.astype(np.int32))
