"""Brightness, saturation, hue and contrast of pictures from 0 to 255, defined as TensorFlow's adjust functions.

- adjust_brightness adds the same number to every pixel.
- adjust_contrast moves each pixel by a factor away from the mean of its channel over the image.
- adjust_saturation and adjust_hue go through hue, saturation and value: the saturation is multiplied and held between 0
  and 1, the hue is turned and wraps around.

Nothing is clipped in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

FINE = float(1 << 20)
"""Sums of pixels are made in whole parts of 1 / FINE: in whole numbers, any order of adding gives the same."""


def adjust(pictures: Tensor, drawn: Tensor, turns: bool) -> Tensor:
    """Pictures with the colors of `data.augment.colors`, clipped to 0 .. 255; `turns` says whether hue or saturation
    change at all."""
    added, saturation, hue, contrast, first = (row[:, None, None, None] for row in drawn)
    made = brightness(pictures, added)
    made = torch.where(first > 0, contrasted(made, contrast), made)
    made = turned(made, saturation, hue) if turns else made
    made = torch.where(first > 0, made, contrasted(made, contrast))
    return made.clamp(0, 255)


def brightness(pictures: Tensor, added: Tensor) -> Tensor:
    """Every pixel and the same number."""
    return pictures + added


def contrasted(pictures: Tensor, factor: Tensor) -> Tensor:
    """Each pixel's distance from the mean of its channel, times a factor."""
    mean = exact_mean(pictures, (2, 3))
    return (pictures - mean) * factor + mean


def turned(pictures: Tensor, saturation: Tensor, turns: Tensor) -> Tensor:
    """Saturation times a factor, held between 0 and 1, and hue turned, by way of hue, saturation and value."""
    red, green, blue = pictures.unbind(1)
    value, low = pictures.amax(1), pictures.amin(1)
    spread = value - low
    divisor = torch.where(spread > 0, spread, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = torch.remainder(sixths + 6 * turns[:, 0], 6)
    share = torch.where(value > 0, spread / torch.where(value > 0, value, 1), 0)
    share = (share * saturation[:, 0]).clamp(0, 1)
    pure = torch.stack([(hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()], 1).clamp(0, 1)
    return value[:, None] * (1 - share[:, None] * (1 - pure))


def exact_mean(numbers: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """Means that depend on nothing but the numbers: neither on their order nor on the batch they are computed in."""
    count = 1
    for dimension in dimensions:
        count *= numbers.shape[dimension]
    total = (numbers * FINE).round().to(torch.int64).sum(dimensions, keepdim=True)
    return total.to(numbers.dtype) / (count * FINE)
