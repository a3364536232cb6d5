"""The operations of AutoAugment and RandAugment on 8-bit pictures, defined as Pillow's and computed in whole numbers.

Whole numbers add and multiply alike everywhere: the same pictures come out on every device and in every batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.augment.policy import NUMBERS, ONE, Layer


def apply(pictures: Tensor, layers: list[Layer], fill: int, smooth: bool) -> Tensor:
    """Pictures [images, channels, rows, columns] after each layer in turn, every kind of operation in one go.

    `fill` is the gray that comes in from outside; `smooth` looks between pixels by bilinear weights.
    """
    groups = [layer.groups for layer in layers]
    if not any(counts for _, counts in groups):
        return pictures
    rows = [np.vstack([order, layer.numbers[:, order]]) for layer, (order, _) in zip(layers, groups, strict=True)]
    host = torch.from_numpy(np.concatenate(rows, axis=1))
    host = host.pin_memory() if pictures.is_cuda else host
    drawn = host.to(pictures.device, non_blocking=True)
    done = pictures.clone()
    start = 0
    for _, counts in groups:
        for kind, count in counts:
            chosen, *numbers = drawn[:, start : start + count]
            assert len(numbers) == NUMBERS
            done[chosen] = operate(kind, done[chosen], torch.stack(numbers).to(torch.int32), fill, smooth)
            start += count
    return done


def operate(kind: str, pictures: Tensor, numbers: Tensor, fill: int, smooth: bool) -> Tensor:
    """One kind of `data.policy.KINDS` for 8-bit pictures; `numbers` has a column for each of them."""
    x = pictures.to(torch.int32)
    if kind == "affine":
        made = _affine(x, numbers, fill, smooth)
    elif kind == "cutout":
        made = torch.where(inside(numbers[:4], x), fill, x)
    else:
        made = _COLORS[kind](x, numbers[0][:, None, None, None])
    return made.to(torch.uint8)


def inside(edges: Tensor, pictures: Tensor) -> Tensor:
    """Which pixels lie in each picture's box, given its top, left, bottom and right: [images, 1, rows, columns]."""
    rows, columns = (torch.arange(length, device=pictures.device) for length in pictures.shape[2:])
    top, left, bottom, right = (edge[:, None] for edge in edges)
    high = (rows >= top) & (rows < bottom)
    wide = (columns >= left) & (columns < right)
    both: Tensor = high[:, :, None] & wide[:, None, :]
    return both[:, None]


def _affine(x: Tensor, numbers: Tensor, fill: int, smooth: bool) -> Tensor:
    """Each pixel from where `data.policy.matrices` says, or `fill` where that lies outside."""
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=torch.int32, device=x.device)[:, None]
    columns = torch.arange(width, dtype=torch.int32, device=x.device)
    a, b, c, d, e, f = numbers[:, :, None, None]
    across, down = c + a * columns + b * rows, f + d * columns + e * rows
    within = (across >= 0) & (across < width * ONE) & (down >= 0) & (down < height * ONE)
    flat = x.flatten(2)

    def look(row: Tensor, column: Tensor) -> Tensor:
        place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        places = place.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        return flat.gather(2, places.long()).view(x.shape)

    if not smooth:
        return torch.where(within[:, None], look(down >> 16, across >> 16), fill)
    left, top = across - ONE // 2, down - ONE // 2  # between the middles of two pixels
    # Weights of 11 bits: two of them and a pixel are just within 31.
    right_share, lower_share = (((place & (ONE - 1)) >> 5)[:, None] for place in (left, top))
    column, row = left >> 16, top >> 16
    upper = look(row, column) * (2048 - right_share) + look(row, column + 1) * right_share
    lower = look(row + 1, column) * (2048 - right_share) + look(row + 1, column + 1) * right_share
    mixed = (upper * (2048 - lower_share) + lower * lower_share) >> 22
    return torch.where(within[:, None], mixed, fill)


def _blend(start: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """From `start` (factor 0) to the picture (1, which is 65536) and beyond, rounded down and clipped."""
    return ((start * ONE + (x - start) * factor) >> 16).clamp(0, 255)


def _gray(x: Tensor) -> Tensor:
    """How bright each pixel is, by the weights of ITU-R 601 in 65536ths."""
    red, green, blue = x.unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + ONE // 2) >> 16)[:, None]


def _mean_gray(x: Tensor) -> Tensor:
    """The mean brightness of each picture, to the nearest whole number."""
    pixels = x.shape[2] * x.shape[3]
    total = _gray(x).sum((1, 2, 3), dtype=torch.int64, keepdim=True)
    return torch.div(2 * total + pixels, 2 * pixels, rounding_mode="floor").to(torch.int32)


def _smooth(x: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels of which the middle counts five times; pixels of the border stay."""
    height, width = x.shape[2:]
    made = x.clone()
    if min(height, width) < 3:
        return made
    total = 4 * x[:, :, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + x[:, :, row : height - 2 + row, column : width - 2 + column]
    made[:, :, 1:-1, 1:-1] = torch.div(2 * total + 13, 26, rounding_mode="floor")
    return made


def _autocontrast(x: Tensor) -> Tensor:
    """Each channel stretched so that it reaches from 0 to 255; one of a single value stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.div((x - low) * 255, (high - low).clamp(min=1), rounding_mode="floor")
    return torch.where(high > low, stretched, x)


def _equalize(x: Tensor) -> Tensor:
    """Each channel with its values spread so that all are about as frequent; one with too few pixels for that stays."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = torch.div(flat.shape[2] - last, 255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    spread = torch.div(step // 2 + below, step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    same = torch.arange(256, device=x.device).expand_as(spread)
    return torch.where(step > 0, spread, same).gather(2, flat).view(x.shape)


_COLORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda x, _: _autocontrast(x),
    "invert": lambda x, _: 255 - x,
    "equalize": lambda x, _: _equalize(x),
    "solarize": lambda x, threshold: torch.where(x < threshold, x, 255 - x),
    "solarize-add": lambda x, added: torch.where(x < 128, x + added, x).clamp(max=255),
    "posterize": lambda x, bits: torch.bitwise_left_shift(torch.bitwise_right_shift(x, 8 - bits), 8 - bits),
    "contrast": lambda x, factor: _blend(_mean_gray(x), x, factor),
    "color": lambda x, factor: _blend(_gray(x), x, factor),
    "brightness": lambda x, factor: _blend(torch.zeros_like(x), x, factor),
    "sharpness": lambda x, factor: _blend(_smooth(x), x, factor),
}
"""Operations on pictures of whole numbers that leave pixels where they are, with one number for each picture."""
