"""Random crops of images in memory: pad each side, then move a window of the old size by a few pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import keyed
from paceline.augment import flip
from paceline.numpy_types import Int64s, UInt8s
from paceline.settings.augment import Augment
from paceline.settings.recipe import Recipe


def draw_offsets(recipe: Recipe, positions: Int64s) -> Int64s:
    """For each position, the row and the column of the padded image at which its crop begins."""
    down, right, _, _ = keyed.words(keyed.key(recipe.seed, "crop and flip"), positions)
    choices = 2 * recipe.augment.pad + 1
    return np.stack([keyed.integers(down, choices), keyed.integers(right, choices)])


def pad(images: UInt8s, augment: Augment) -> UInt8s:
    """Images (image, row, column, channel) with the border that crops may reach into."""
    if augment.pad == 0:
        return images
    edge = ((0, 0), (augment.pad, augment.pad), (augment.pad, augment.pad), (0, 0))
    return np.pad(images, edge, mode="reflect" if augment.fill == "mirror" else "constant")


def crop(padded: Any, indices: Any, offsets: Any, flipped: Any, pixels: Any) -> Any:
    """Crops of the padded images with these indices, mirrored where `flipped` is 1, in one gather.

    `pixels` is 0 .. side-1. All arguments are NumPy arrays, or all are tensors.
    """
    down, right = (offset[:, None] for offset in offsets)
    rows, columns = down + pixels, right + flip.columns(flipped, pixels)
    return padded[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
