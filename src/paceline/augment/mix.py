"""Mixup and cutmix: images are blended with, or pasted into, their neighbors in a block, and labels likewise."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline import keyed
from paceline.augment.erase import inside
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.augment import BetaCut, Cut, FixedCut, LogarithmicCut, UniformCut
from paceline.settings.recipe import Recipe

ROWS = ("own", "top", "left", "bottom", "right")
"""What is drawn for each image: the weight of its own pixels in mixup, and the box that cutmix pastes (pixels)."""


def draw_mix(recipe: Recipe, positions: Int64s, side: int) -> Float64s | None:
    """For each position the rows of ROWS, computed on the host in float64."""
    mixing = recipe.mix
    if not mixing.active:
        return None
    own = np.ones(len(positions))
    kept = np.ones(len(positions))
    if mixing.mixup:
        own = betas(keyed.key(recipe.seed, "mixup"), positions, mixing.mixup)
        own = np.maximum(own, 1 - own) if mixing.mixup_larger else own
    if mixing.cutmix is not None:
        kept = _kept_fraction(recipe.seed, mixing.cutmix, positions)
        chance, switch, *_ = keyed.words(keyed.key(recipe.seed, "mix chance"), positions)
        kept = np.where(_fraction(chance) < mixing.cutmix_probability, kept, 1.0)
        if mixing.switch_probability is not None:  # one of the two for each image
            cuts = _fraction(switch) < mixing.switch_probability
            own, kept = np.where(cuts, 1.0, own), np.where(cuts, kept, 1.0)
    return np.stack([own, *_pasted_boxes(recipe.seed, positions, kept, side)])


def mix(images: Tensor, labels: Tensor, drawn: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mixed images, and the labels and weights of the four images that each may contain, by the rows of ROWS.

    An image is blended with the next of its block; then a box of the blend after the next, two on (one in a block of
    two), is pasted into it.
    """
    own, *edges = drawn.to(images.dtype)
    indices = torch.arange(len(images), device=images.device)
    first = _neighbor(indices, 1, block)
    second = _neighbor(indices, 2 if block > 2 else 1, block)
    weight = own[:, None, None, None]
    blended = weight * images + (1 - weight) * images[first]
    pasted = torch.where(inside(torch.stack(edges), images), blended[second], blended)
    return pasted, *mixed_labels(labels, drawn.to(images.dtype), images.shape[2:].numel(), block)


def mixed_labels(labels: Tensor, drawn: Tensor, pixels: int, block: int) -> tuple[Tensor, Tensor]:
    """The labels and weights of the four images that each mixed one may contain; `pixels` is how many an image has."""
    own, top, left, bottom, right = drawn
    indices = torch.arange(len(labels), device=labels.device)
    first = _neighbor(indices, 1, block)
    second = _neighbor(indices, 2 if block > 2 else 1, block)
    area = (bottom - top) * (right - left) / pixels  # what counts is what was pasted
    theirs = own[second]
    weights = [own * (1 - area), (1 - own) * (1 - area), theirs * area, (1 - theirs) * area]
    terms = [labels, labels[first], labels[second], labels[first[second]]]
    return torch.stack(terms, 1), torch.stack(weights, 1)


def betas(key: int, positions: Int64s, alpha: float) -> Float64s:
    """A number from Beta(alpha, alpha), alpha at most 1, for each position, by Johnk's method: powers of two uniforms,
    tried again with the next index until their sum is at most 1, which at least half of all pairs satisfy.

    Both powers are zero only where alpha is so small that Beta is 0 or 1 to all digits: then either, as likely."""
    result = (keyed.words(key, positions, 100)[0] >> 31).astype(np.float64)
    remaining = np.arange(len(positions))
    for attempt in range(100):
        a, b, c, d = keyed.words(key, positions[remaining], attempt)
        x, y = (np.power(keyed.uniforms(*pair), 1 / alpha) for pair in ((a, b), (c, d)))
        accepted = (x + y <= 1) & (x + y > 0)
        result[remaining[accepted]] = x[accepted] / (x + y)[accepted]
        remaining = remaining[~accepted]
        if not len(remaining):
            break
    return result


def _kept_fraction(seed: int, cut: Cut, positions: Int64s) -> Float64s:
    """The fraction of each image's own pixels that cutmix keeps."""
    a, b, c, d = keyed.words(keyed.key(seed, "cutmix"), positions)
    first, second = keyed.uniforms(a, b), keyed.uniforms(c, d)
    match cut:
        case FixedCut(kept=kept):
            return np.full(len(positions), kept)
        case LogarithmicCut(kept=kept):
            logarithmic = 1 + np.log(math.exp(-4) + (1 - math.exp(-4)) * first) / 4
            return np.where(second < 1.55 * kept - 0.96, 1.0, logarithmic)
        case UniformCut(low=low, high=high):
            return low + (high - low) * np.asarray(first, np.float64)
        case BetaCut(alpha=alpha):
            return betas(keyed.key(seed, "cutmix beta"), positions, alpha)


def _pasted_boxes(seed: int, positions: Int64s, kept: Float64s, side: int) -> list[Float64s]:
    """Boxes inside the image, of its shape and as near as whole pixels come to the fraction that is not kept."""
    length = np.rint(side * np.sqrt(1 - kept)).astype(np.int64)
    down, right, *_ = keyed.words(keyed.key(seed, "cutmix box"), positions)
    top, left = ((word * (side - length + 1)) >> 32 for word in (down, right))
    return [edge.astype(np.float64) for edge in (top, left, top + length, left + length)]


def _fraction(words: Int64s) -> Float64s:
    return np.asarray(words * 2.0**-32, np.float64)


def _neighbor(indices: Tensor, distance: int, block: int) -> Tensor:
    """The image so many places on in its block, which is a ring."""
    return indices - indices % block + (indices % block + distance) % block
