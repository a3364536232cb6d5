"""Which part of each image is seen: random boxes for training by keyed numbers, the usual center for evaluation.

Every operation here is exact by IEEE 754 (the exponential too, which is why it is written out), so that a box depends
on the seed, the position and the image's size, and never on the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.settings.augment import Crop
from paceline.settings.data import Center, Squash

Whole = NDArray[np.int64]
Numbers = NDArray[np.float64]
Truth = NDArray[np.bool_]

TRIES_AT_ONCE = 16
"""Tries of one image that are drawn together at most: most images are content with the first."""


def training_boxes(
    seed: int,
    crop: Crop,
    positions: Whole,
    widths: Whole,
    heights: Whole,
    rows: NDArray[Any] | None = None,
    objects: NDArray[np.float32] | None = None,
) -> Whole:
    """For each position of the endless list, top, left, height and width (pixels) of the box that is resized.

    `rows` are those of the index for the images that stand there, and `objects` their table's objects; both are needed
    only where the crop has an `object_fraction`.
    """
    key = keyed.key(seed, "crop box")
    positions = np.asarray(positions, np.int64)
    widths, heights = (np.maximum(np.asarray(sizes, np.int64), 1) for sizes in (widths, heights))
    boxes = _after_the_last_try(crop, widths, heights)
    rest, tried, together = np.arange(len(positions)), 0, 1
    draw = _torch_boxes if crop.distribution == "logarithmic" else _tensorflow_boxes
    while len(rest) and tried < crop.tries:
        numbers = np.arange(tried, min(tried + together, crop.tries))
        words = keyed.words(key, positions[rest, None], numbers)
        drawn, good = draw(crop, words, widths[rest, None], heights[rest, None])
        if crop.object_fraction > 0 and rows is not None and objects is not None:
            good &= _hold_objects(crop.object_fraction, drawn, rows[rest], objects, widths[rest], heights[rest])
        found = good.any(axis=1)
        boxes[rest[found]] = drawn[:, found, good.argmax(axis=1)[found]].T
        rest, tried, together = rest[~found], tried + len(numbers), min(4 * together, TRIES_AT_ONCE)
    return boxes


def evaluation_boxes(how: Center | Squash, side: int, widths: Whole, heights: Whole) -> Numbers:
    """For each image, top, left, height and width (pixels and parts of them) of what becomes `side` x `side`.

    A center is where torchvision's Resize(short) and CenterCrop(side) look, with their rounding. Where `short` is less
    than `side` they would add a black border; here the shorter edge is then seen whole.
    """
    sizes = np.maximum(np.stack([heights, widths]).astype(np.int64), 1)
    if isinstance(how, Squash):
        length = sizes * how.fraction
        return np.concatenate([(sizes - length) / 2, length]).T
    short = max(how.shorter(side), side)
    resized = short * sizes // sizes.min(axis=0)
    first = np.rint((resized - side) / 2)
    return np.concatenate([first * sizes / resized, side * sizes / resized]).T


def _torch_boxes(crop: Crop, words: keyed.Words[Whole], widths: Whole, heights: Whole) -> tuple[Whole, Truth]:
    """torchvision's RandomResizedCrop: any area, each doubling of the shape as likely; whether each box fits."""
    size, shape, down, right = words
    low, high = crop.area
    area = (low + (high - low) * (size * 2.0**-32)) * (widths * heights)
    # The library's logarithm may err in its last bit, and not everywhere alike: round that bit away.
    shortest, longest = (round(math.log(aspect) * 2.0**40) * 2.0**-40 for aspect in crop.aspect)
    aspect = _exponential(shortest + (longest - shortest) * (shape.astype(np.float64) * 2.0**-32))
    width, height = (np.rint(np.sqrt(edge)).astype(np.int64) for edge in (area * aspect, area / aspect))
    good = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    return _place(width, height, down, right, widths, heights), good


def _tensorflow_boxes(crop: Crop, words: keyed.Words[Whole], widths: Whole, heights: Whole) -> tuple[Whole, Truth]:
    """TensorFlow's sample_distorted_bounding_box: any shape, then any height that the areas allow."""
    size, shape, down, right = words
    aspect = crop.aspect[0] + (crop.aspect[1] - crop.aspect[0]) * (shape * 2.0**-32)
    least, most = (share * (widths * heights) for share in crop.area)
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
    good = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    good &= (height * width >= least) & (height * width <= most)
    return _place(width, height, down, right, widths, heights), good


def _place(width: Whole, height: Whole, down: Whole, right: Whole, widths: Whole, heights: Whole) -> Whole:
    """Boxes at any place of the image; those too large for it are at its corner, and will not be used."""
    top = down * (np.maximum(heights - height, 0) + 1) >> 32
    left = right * (np.maximum(widths - width, 0) + 1) >> 32
    return np.stack([top, left, height, width])


def _after_the_last_try(crop: Crop, widths: Whole, heights: Whole) -> Whole:
    """The whole image, or as much of its center as the shapes allow."""
    height, width = heights, widths
    if crop.otherwise == "center":
        narrowest, widest = crop.aspect
        height = np.minimum(heights, np.maximum(np.rint(widths / narrowest), 1)).astype(np.int64)
        width = np.minimum(widths, np.maximum(np.rint(heights * widest), 1)).astype(np.int64)
        # Only the edge that is too long is cut: an image within the shapes, up to rounding, stays whole.
        height = np.where(widths < narrowest * heights, height, heights)
        width = np.where(widths > widest * heights, width, widths)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)


def _hold_objects(
    share: float, drawn: Whole, rows: NDArray[Any], objects: NDArray[np.float32], widths: Whole, heights: Whole
) -> Truth:
    """Whether each box holds this share of one of its image's objects; true where the image has none."""
    counts = rows["objects"].astype(np.int64)
    owner = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    edges = np.clip(objects[rows["first_object"].astype(np.int64)[owner] + within].astype(np.float64), 0, 1)
    # A share of 24 bits times a number of pixels is exact.
    top, bottom = (edges[:, edge, None] * heights[owner, None] for edge in (0, 2))
    left, right = (edges[:, edge, None] * widths[owner, None] for edge in (1, 3))
    area = np.maximum(bottom - top, 0) * np.maximum(right - left, 0)
    first_row, first_column, rows_seen, columns_seen = drawn[:, owner]
    seen_down = np.minimum(bottom, first_row + rows_seen) - np.maximum(top, first_row)
    seen_across = np.minimum(right, first_column + columns_seen) - np.maximum(left, first_column)
    seen = np.maximum(seen_down, 0) * np.maximum(seen_across, 0)
    real = area[:, 0] > 0
    held = np.zeros(drawn.shape[1:], np.bool_)
    held[np.setdiff1d(np.arange(len(rows)), owner[real])] = True
    np.logical_or.at(held, owner[real], (seen >= share * area)[real])
    return held


def _exponential(x: Numbers) -> Numbers:
    """e to the power of x: a power of two, times the series on what is left (|left| < 0.35, good to 1e-15)."""
    doublings = np.rint(x * (1 / math.log(2)))
    left = x - doublings * 0.693147180559945309
    value = np.ones_like(left)
    for k in range(14, 0, -1):
        value = 1 + value * left / k
    return np.ldexp(value, doublings.astype(np.int32))
