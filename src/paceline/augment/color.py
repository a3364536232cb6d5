"""Random brightness, saturation, hue and contrast of pixels from 0 to 255, defined as TensorFlow's adjust functions.

- adjust_brightness adds the same number to every pixel.
- adjust_contrast moves each pixel by a factor away from the mean of its channel over the image.
- adjust_saturation and adjust_hue go through hue, saturation and value: the saturation is multiplied and clipped to
  0 .. 1, the hue is turned and wraps around.

Nothing is clipped in between.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline import keyed
from paceline.augment.exact_mean import exact_mean
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.augment import Augment
from paceline.settings.recipe import Recipe


def draw_color(recipe: Recipe, positions: Int64s, _side: int) -> Float64s | None:
    """For each position: what is added to its pixels (of 255), the factor of its saturation, the turns of its hue, the
    factor of its contrast, and 1 where contrast comes before saturation and hue."""
    color = recipe.augment.color
    if not color.active:
        return None
    key = keyed.key(recipe.seed, "colour")
    a, b, c, d = keyed.words(key, positions)
    e, f, g, h = keyed.words(key, positions, 1)
    contrast_first = keyed.words(key, positions, 2)[0] >> 31
    brightness = 255 * color.brightness * (2 * keyed.uniforms(a, b) - 1)
    saturation, contrast = (
        low + (high - low) * keyed.uniforms(*pair)
        for (low, high), pair in ((color.saturation, (c, d)), (color.contrast, (g, h)))
    )
    turns = color.hue * (2 * keyed.uniforms(e, f) - 1)
    return np.stack([brightness, saturation, turns, contrast, contrast_first.astype(np.float64)])


def adjust_color(augment: Augment, images: Tensor, drawn: Tensor) -> Tensor:
    """Images with the numbers of `draw_color` applied, clipped to 0 .. 255."""
    brightness, saturation, turns, contrast, contrast_first = (row[:, None, None, None] for row in drawn)
    images = images + brightness
    images = torch.where(contrast_first > 0, adjust_contrast(images, contrast), images)
    if augment.color.turns:
        images = adjust_hue_and_saturation(images, saturation, turns)
    images = torch.where(contrast_first > 0, images, adjust_contrast(images, contrast))
    return images.clamp(0, 255)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Images whose pixels' distance from the mean of their channel is multiplied by a factor."""
    mean = exact_mean(images, (2, 3))
    return (images - mean) * factor + mean


def adjust_hue_and_saturation(images: Tensor, saturation: Tensor, turns: Tensor) -> Tensor:
    """Images with their saturation multiplied, clipped to 0 .. 1, and their hue turned (1 is a full turn)."""
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    chroma = value - lowest
    divisor = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = torch.remainder(sixths + 6 * turns[:, 0], 6)
    saturated = torch.where(value > 0, chroma / torch.where(value > 0, value, 1), 0)
    saturated = (saturated * saturation[:, 0]).clamp(0, 1)
    pure = torch.stack([(hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()], 1).clamp(0, 1)
    return value[:, None] * (1 - saturated[:, None] * (1 - pure))
