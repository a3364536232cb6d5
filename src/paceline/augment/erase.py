"""Random erasing and cutout: boxes of an image that become zero after normalization, which is the mean color."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline import keyed
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.augment import Augment
from paceline.settings.recipe import Recipe

_ATTEMPTS = 10
"""Boxes that are tried for an image before it keeps all of its pixels."""


def draw_erase(recipe: Recipe, positions: Int64s, side: int) -> Float64s | None:
    """For each position, top, left, bottom and right (pixels) of a box inside the image, which may be empty: area and
    shape are drawn again, up to ten times, until the box is smaller than the image."""
    erase = recipe.augment.erase
    if not erase.probability:
        return None
    edges = np.zeros((4, len(positions)), np.int64)
    key = keyed.key(recipe.seed, "erase")
    remaining = np.flatnonzero(keyed.uniforms(*keyed.words(key, positions)[:2]) < erase.probability)
    shortest, longest = np.log(erase.aspect)
    for attempt in range(1, _ATTEMPTS + 1):
        sizes, shapes, down, right = keyed.words(key, positions[remaining], attempt)
        area = side * side * (erase.area[0] + (erase.area[1] - erase.area[0]) * sizes * 2.0**-32)
        aspect = np.exp(shortest + (longest - shortest) * shapes * 2.0**-32)
        height, width = (np.rint(np.sqrt(size)).astype(np.int64) for size in (area * aspect, area / aspect))
        fits = (height < side) & (width < side)
        top, left = ((word * (side - length + 1)) >> 32 for word, length in ((down, height), (right, width)))
        edges[:, remaining[fits]] = np.stack([top, left, top + height, left + width])[:, fits]
        remaining = remaining[~fits]
    return edges.astype(np.float64)


def draw_cutout(recipe: Recipe, positions: Int64s, side: int) -> Float64s | None:
    """For each position, top, left, bottom and right (pixels) of its square of `augment.cutout` pixels a side."""
    if not recipe.augment.cutout:
        return None
    down, right, *_ = keyed.words(keyed.key(recipe.seed, "cutout"), positions)
    return squares(down, right, np.full(len(positions), recipe.augment.cutout), side).astype(np.float64)


def squares(down: Int64s, right: Int64s, length: Int64s, side: int) -> Int64s:
    """Edges of squares centered on any pixel, chosen by two random words each, and clipped at the border."""
    top, left = (keyed.integers(word, side) - length // 2 for word in (down, right))
    return np.clip(np.stack([top, left, top + length, left + length]), 0, side)


def zero_boxes(_augment: Augment, images: Tensor, edges: Tensor) -> Tensor:
    """Images with the pixels inside their box set to zero."""
    return torch.where(inside(edges, images), 0, images)


def inside(edges: Tensor, images: Tensor) -> Tensor:
    """Which pixels lie in each image's box, given its top, left, bottom and right: [images, 1, rows, columns]."""
    rows, columns = (torch.arange(length, device=images.device) for length in images.shape[2:])
    top, left, bottom, right = (edge[:, None] for edge in edges)
    in_rows = (rows >= top) & (rows < bottom)
    in_columns = (columns >= left) & (columns < right)
    both: Tensor = in_rows[:, :, None] & in_columns[:, None, :]
    return both[:, None]
