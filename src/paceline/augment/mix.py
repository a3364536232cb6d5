"""Mixup and cutmix: images blended with, or pasted into, their neighbors in a block, by numbers keyed to positions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.settings.augment import BetaCut, Cut, FixedCut, LogarithmicCut, UniformCut
from paceline.settings.recipe import Recipe

Positions = NDArray[np.int64]
Numbers = NDArray[np.float64]

ROWS = ("own", "top", "left", "bottom", "right")
"""What is drawn for each image: the weight of its own pixels in mixup, and the box that cutmix pastes (pixels)."""


def draw(recipe: Recipe, positions: Positions, side: int) -> Numbers:
    """For the image at each position the rows of ROWS, made on the host in float64."""
    mix = recipe.mix
    own = np.ones(len(positions))
    kept = np.ones(len(positions))
    if mix.mixup:
        own = betas(keyed.key(recipe.seed, "mixup"), positions, mix.mixup)
        own = np.maximum(own, 1 - own) if mix.mixup_larger else own
    if mix.cutmix is not None:
        kept = _kept(recipe.seed, mix.cutmix, positions)
        chance, where, *_ = keyed.words(keyed.key(recipe.seed, "mix chance"), positions)
        kept = np.where(_share(chance) < mix.cutmix_probability, kept, 1.0)
        if mix.switch_probability is not None:  # one of the two for each image
            cuts = _share(where) < mix.switch_probability
            own, kept = np.where(cuts, 1.0, own), np.where(cuts, kept, 1.0)
    return np.stack([own, *_boxes(recipe.seed, positions, kept, side)])


def _kept(seed: int, cut: Cut, positions: Positions) -> Numbers:
    """The share of each image's own pixels that cutmix keeps."""
    a, b, c, d = keyed.words(keyed.key(seed, "cutmix"), positions)
    first, second = keyed.uniforms(a, b), keyed.uniforms(c, d)
    match cut:
        case FixedCut(kept=kept):
            return np.full(len(positions), kept)
        case LogarithmicCut(kept=kept):
            drawn = 1 + np.log(math.exp(-4) + (1 - math.exp(-4)) * first) / 4
            return np.where(second < 1.55 * kept - 0.96, 1.0, drawn)
        case UniformCut(low=low, high=high):
            return low + (high - low) * np.asarray(first, np.float64)
        case BetaCut(alpha=alpha):
            return betas(keyed.key(seed, "cutmix beta"), positions, alpha)


def _boxes(seed: int, positions: Positions, kept: Numbers, side: int) -> list[Numbers]:
    """Boxes inside the image, of its shape and as near as whole pixels come to the share that is not kept."""
    length = np.rint(side * np.sqrt(1 - kept)).astype(np.int64)
    down, right, *_ = keyed.words(keyed.key(seed, "cutmix box"), positions)
    top, left = ((word * (side - length + 1)) >> 32 for word in (down, right))
    return [edge.astype(np.float64) for edge in (top, left, top + length, left + length)]


def betas(key: int, positions: Positions, alpha: float) -> Numbers:
    """A number from Beta(alpha, alpha), alpha at most 1, for each position, by Johnk's method: powers of two uniforms,
    tried again with the next index until their sum is at most 1, which at least half of all pairs satisfy.

    Both powers are zero only where alpha is so small that Beta is 0 or 1 to all digits: then either, as likely."""
    result = (keyed.words(key, positions, 100)[0] >> 31).astype(np.float64)
    rest = np.arange(len(positions))
    for attempt in range(100):
        a, b, c, d = keyed.words(key, positions[rest], attempt)
        x, y = (np.power(keyed.uniforms(*pair), 1 / alpha) for pair in ((a, b), (c, d)))
        good = (x + y <= 1) & (x + y > 0)
        result[rest[good]] = x[good] / (x + y)[good]
        rest = rest[~good]
        if not len(rest):
            break
    return result


def _share(words: Positions) -> Numbers:
    return np.asarray(words * 2.0**-32, np.float64)
