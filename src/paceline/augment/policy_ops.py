"""The operations of AutoAugment and RandAugment on 8-bit images, defined as Pillow's and computed in integers.

Integers add and multiply alike everywhere: every device and batch size gives the same images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.augment.erase import inside
from paceline.augment.policy import ONE, PARAMETERS, PolicyLayer
from paceline.device import pinned
from paceline.settings.augment import Policy


@dataclass(frozen=True)
class PolicyDraws:
    """What a policy does to the images of a micro-batch, every kind of operation of a layer in one go."""

    groups: list[tuple[str, int]]
    """Kinds of operations, layer after layer, and how many images get each."""
    rows: Tensor
    """A column for each of those images, in that order: its index, then PARAMETERS integers."""

    @classmethod
    def of(cls, layers: list[PolicyLayer], device: torch.device) -> PolicyDraws | None:
        """The layers in memory that the device can copy from; None where they do nothing to any image."""
        grouped = [layer.grouped() for layer in layers]
        groups = [group for counts, _ in grouped for group in counts]
        return cls(groups, pinned(np.hstack([rows for _, rows in grouped]), device)) if groups else None

    def to(self, device: torch.device) -> PolicyDraws:
        """The same draws on the device, without waiting for the copy."""
        return PolicyDraws(self.groups, self.rows.to(device, non_blocking=True))


def apply_policy(policy: Policy, images: Tensor, draws: PolicyDraws) -> Tensor:
    """8-bit images [images, channels, rows, columns] after all operations.

    How many images an operation is for changes from batch to batch, so a CUDA graph cannot hold this.
    """
    result, start = images.clone(), 0
    for kind, count in draws.groups:
        chosen, *parameters = draws.rows[:, start : start + count]
        assert len(parameters) == PARAMETERS
        integers = torch.stack(parameters).to(torch.int32)
        result[chosen] = operate(kind, result[chosen], integers, policy.fill, policy.sampling == "bilinear")
        start += count
    return result


def operate(kind: str, images: Tensor, parameters: Tensor, fill: int, smooth: bool) -> Tensor:
    """8-bit images after one of `policy.KINDS`; `parameters` has a column for each image, `fill` is the gray that comes
    in from outside, and `smooth` interpolates bilinearly between pixels."""
    x = images.to(torch.int32)
    if kind == "affine":
        result = _affine(x, parameters, fill, smooth)
    elif kind == "cutout":
        result = torch.where(inside(parameters[:4], x), fill, x)
    else:
        result = _COLORS[kind](x, parameters[0][:, None, None, None])
    return result.to(torch.uint8)


def _affine(x: Tensor, parameters: Tensor, fill: int, smooth: bool) -> Tensor:
    """Each pixel from where `policy.matrices` says, or `fill` where that lies outside."""
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=torch.int32, device=x.device)[:, None]
    columns = torch.arange(width, dtype=torch.int32, device=x.device)
    a, b, c, d, e, f = parameters[:, :, None, None]
    across, down = c + a * columns + b * rows, f + d * columns + e * rows
    within = (across >= 0) & (across < width * ONE) & (down >= 0) & (down < height * ONE)
    flat = x.flatten(2)

    def look(row: Tensor, column: Tensor) -> Tensor:
        index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        indices = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        return flat.gather(2, indices.long()).view(x.shape)

    if not smooth:
        return torch.where(within[:, None], look(down >> 16, across >> 16), fill)
    left, top = across - ONE // 2, down - ONE // 2  # between the centers of two pixels
    # Weights of 11 bits: two of them and a pixel are just within 31.
    right_weight, lower_weight = (((offset & (ONE - 1)) >> 5)[:, None] for offset in (left, top))
    column, row = left >> 16, top >> 16
    upper = look(row, column) * (2048 - right_weight) + look(row, column + 1) * right_weight
    lower = look(row + 1, column) * (2048 - right_weight) + look(row + 1, column + 1) * right_weight
    mixed = (upper * (2048 - lower_weight) + lower * lower_weight) >> 22
    return torch.where(within[:, None], mixed, fill)


def _blend(start: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """From `start` (factor 0) to the image (1, which is 65536) and beyond, rounded down and clipped."""
    return ((start * ONE + (x - start) * factor) >> 16).clamp(0, 255)


def _gray(x: Tensor) -> Tensor:
    """The brightness of each pixel, by the weights of ITU-R 601 in 65536ths."""
    red, green, blue = x.unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + ONE // 2) >> 16)[:, None]


def _mean_gray(x: Tensor) -> Tensor:
    """The mean brightness of each image, to the nearest integer."""
    pixels = x.shape[2] * x.shape[3]
    total = _gray(x).sum((1, 2, 3), dtype=torch.int64, keepdim=True)
    return torch.div(2 * total + pixels, 2 * pixels, rounding_mode="floor").to(torch.int32)


def _smooth(x: Tensor) -> Tensor:
    """The mean over 3 x 3 pixels, the center counted five times; pixels of the border stay."""
    height, width = x.shape[2:]
    result = x.clone()
    if min(height, width) < 3:
        return result
    total = 4 * x[:, :, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + x[:, :, row : height - 2 + row, column : width - 2 + column]
    result[:, :, 1:-1, 1:-1] = torch.div(2 * total + 13, 26, rounding_mode="floor")
    return result


def _autocontrast(x: Tensor) -> Tensor:
    """Each channel stretched so that it reaches from 0 to 255; one of a single value stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.div((x - low) * 255, (high - low).clamp(min=1), rounding_mode="floor")
    return torch.where(high > low, stretched, x)


def _equalize(x: Tensor) -> Tensor:
    """Each channel with its values made about equally frequent; one with too few pixels for that stays."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = torch.div(flat.shape[2] - last, 255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    equalized = torch.div(step // 2 + below, step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    same = torch.arange(256, device=x.device).expand_as(equalized)
    return torch.where(step > 0, equalized, same).gather(2, flat).view(x.shape)


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
"""Operations that leave pixels where they are, each with one parameter for each image."""
