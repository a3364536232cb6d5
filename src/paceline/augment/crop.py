"""What happens to each image, by numbers keyed to its place in the endless list: crop, flip, color, boxes.

Crops and flips are the same pixels on host and device; of colors and boxes only the numbers are made here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.settings.augment import Augment
from paceline.settings.recipe import Recipe

Whole = NDArray[np.int64]
Numbers = NDArray[np.float64]

ATTEMPTS = 10
"""Boxes that are tried for an image before it keeps all of its pixels."""


def draw(recipe: Recipe, positions: Whole, numbers: Whole, epochs: Whole) -> Whole:
    """For each position: rows and columns that the crop is moved by, and 1 where the image is mirrored; `numbers` are
    the images that stand there, and `epochs` their epochs."""
    down, right, mirror, _ = keyed.words(keyed.key(recipe.seed, "crop and flip"), positions)
    reach = 2 * recipe.augment.pad + 1
    mirrored = mirror >> 31 if recipe.augment.flip else mirror * 0
    if recipe.augment.alternate_flip:
        begins = keyed.words(keyed.key(recipe.seed, "alternate flip"), numbers)[0] >> 31
        mirrored = (begins + epochs) % 2
    return np.stack([keyed.integers(down, reach), keyed.integers(right, reach), mirrored])


def still(augment: Augment, count: int) -> Whole:
    """The draw that leaves `count` images as they are."""
    return np.stack([np.full(count, augment.pad), np.full(count, augment.pad), np.zeros(count)]).astype(np.int64)


def widen(pictures: NDArray[np.uint8], augment: Augment) -> NDArray[np.uint8]:
    """Pictures with the border that crops may reach into."""
    if augment.pad == 0:
        return pictures
    edge = ((0, 0), (augment.pad, augment.pad), (augment.pad, augment.pad), (0, 0))
    return np.pad(pictures, edge, mode="reflect" if augment.fill == "mirror" else "constant")


def crop(wide: Any, numbers: Any, moves: Any, steps: Any) -> Any:
    """Crops of pictures `numbers` of a widened set; `steps` is 0 .. side-1. Arrays or tensors, as they come."""
    down, right, mirrored = (move[:, None] for move in moves)
    rows = down + steps
    columns = right + steps + mirrored * (len(steps) - 1 - 2 * steps)
    return wide[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]


def colors(recipe: Recipe, positions: Whole) -> Numbers:
    """For each position: what is added to its pixels (of 255), the factor of its saturation, the turns of its hue, the
    factor of its contrast, and 1 where contrast comes before saturation and hue."""
    color = recipe.augment.color
    key = keyed.key(recipe.seed, "colour")
    a, b, c, d = keyed.words(key, positions)
    e, f, g, h = keyed.words(key, positions, 1)
    first = keyed.words(key, positions, 2)[0] >> 31
    added = 255 * color.brightness * (2 * keyed.uniforms(a, b) - 1)
    saturation, contrast = (
        low + (high - low) * keyed.uniforms(*pair)
        for (low, high), pair in ((color.saturation, (c, d)), (color.contrast, (g, h)))
    )
    turns = color.hue * (2 * keyed.uniforms(e, f) - 1)
    return np.stack([added, saturation, turns, contrast, first.astype(np.float64)])


def boxes(recipe: Recipe, positions: Whole, side: int) -> Numbers:
    """For each position: top, left, bottom and right (pixels) of the box that `erase` empties, and of that of `cutout`;
    a box without pixels is none."""
    return np.stack([*_erased(recipe, positions, side), *_cut_out(recipe, positions, side)]).astype(np.float64)


def _erased(recipe: Recipe, positions: Whole, side: int) -> Whole:
    """Boxes inside the image: area and shape are drawn again, up to ten times, until one is smaller than the image."""
    erase = recipe.augment.erase
    edges = np.zeros((4, len(positions)), np.int64)
    key = keyed.key(recipe.seed, "erase")
    rest = np.flatnonzero(keyed.uniforms(*keyed.words(key, positions)[:2]) < erase.probability)
    shortest, longest = np.log(erase.aspect)
    for attempt in range(1, ATTEMPTS + 1):
        sizes, shapes, down, right = keyed.words(key, positions[rest], attempt)
        area = side * side * (erase.area[0] + (erase.area[1] - erase.area[0]) * sizes * 2.0**-32)
        aspect = np.exp(shortest + (longest - shortest) * shapes * 2.0**-32)
        height, width = (np.rint(np.sqrt(size)).astype(np.int64) for size in (area * aspect, area / aspect))
        good = (height < side) & (width < side)
        top, left = ((word * (side - length + 1)) >> 32 for word, length in ((down, height), (right, width)))
        edges[:, rest[good]] = np.stack([top, left, top + height, left + width])[:, good]
        rest = rest[~good]
    return edges


def _cut_out(recipe: Recipe, positions: Whole, side: int) -> Whole:
    down, right, *_ = keyed.words(keyed.key(recipe.seed, "cutout"), positions)
    return square(down, right, np.full(len(positions), recipe.augment.cutout), side)


def square(down: Whole, right: Whole, length: Whole, side: int) -> Whole:
    """Edges of squares centered on any pixel, by two words each, and cut at the border."""
    top, left = (keyed.integers(word, side) - length // 2 for word in (down, right))
    return np.clip(np.stack([top, left, top + length, left + length]), 0, side)
