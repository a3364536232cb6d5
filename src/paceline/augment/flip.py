"""Horizontal flips: at random, or each image in every other epoch."""

from __future__ import annotations

from typing import Any

from paceline import keyed
from paceline.numpy_types import Int64s
from paceline.settings.recipe import Recipe


def draw_flips(recipe: Recipe, positions: Int64s, images: Int64s, epochs: Int64s) -> Int64s:
    """1 for each position whose image is mirrored, else 0; `images` and `epochs` are the image and the epoch of each
    position."""
    if recipe.augment.alternate_flip:
        first_epoch = keyed.words(keyed.key(recipe.seed, "alternate flip"), images)[0] >> 31
        return (first_epoch + epochs) % 2
    if recipe.augment.flip:
        return keyed.words(keyed.key(recipe.seed, "crop and flip"), positions)[2] >> 31
    return positions * 0


def columns(flipped: Any, pixels: Any) -> Any:
    """For each image, the column that each of its `pixels` (0 .. side-1) is taken from."""
    return pixels + flipped[:, None] * (len(pixels) - 1 - 2 * pixels)
