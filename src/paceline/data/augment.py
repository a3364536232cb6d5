"""Random crop and flip by numbers keyed to an image's place in the endless list; the same pixels on host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.recipe import Augment, Recipe


def draw(recipe: Recipe, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each position: rows and columns that the crop is moved by, and 1 where the image is mirrored."""
    down, right, mirror, _ = keyed.words(keyed.key(recipe.seed, "crop and flip"), positions)
    reach = 2 * recipe.augment.pad + 1
    mirrored = mirror >> 31 if recipe.augment.flip else mirror * 0
    return np.stack([keyed.integers(down, reach), keyed.integers(right, reach), mirrored])


def still(augment: Augment, count: int) -> NDArray[np.int64]:
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
