"""Boxes of many images of many sizes, resized to one size in a few kernels, on any device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.device import to_device
from paceline.numpy_types import Bools, Float64s, Int64s

PIXELS_AT_ONCE = 1 << 25
"""About how many pixels are resized together: each box is padded to the largest of its group."""


def resample(
    images: Sequence[Tensor], boxes: NDArray[Any], flipped: Bools, side: int,
    filter: Literal["bilinear", "bicubic"], inside: bool,
) -> Tensor:  # fmt: skip
    """The boxes (top, left, height, width) of 8-bit images (channel, height, width), resized with antialiasing to
    square images (side, side, channel). With `inside`, pixels outside a box are not used, as after a crop."""
    reach = 1.0 if filter == "bilinear" else 2.0
    start, size = boxes[:, :2].astype(np.float64), boxes[:, 2:].astype(np.float64)
    scales = size / side
    support = reach * np.maximum(scales, 1)
    limits = np.array([image.shape[1:] for image in images], np.float64)
    first = np.maximum(np.floor(start + 0.5 * scales - support), start if inside else 0)
    last = np.minimum(np.ceil(start + size - 0.5 * scales + support), start + size if inside else limits)
    lengths = (last - first).astype(np.int64)
    geometry = np.concatenate([start, first, lengths, scales, flipped[:, None]], 1)
    if images[0].is_cuda and _has_triton():
        return _in_one_kernel(images, np.concatenate([geometry, limits], 1), side, filter == "bicubic")
    corners = np.concatenate([first, first + lengths], 1).astype(np.int64).tolist()
    windows = [image[:, t:b, x:r] for image, (t, x, b, r) in zip(images, corners, strict=True)]
    groups, resized = list(_together(lengths)), []
    for group in groups:
        # The geometry of each box is copied to the device in one piece; the many weights are computed there.
        boxes_here = to_device(geometry[group], images[0].device)
        resized.append(_product([windows[i] for i in group], boxes_here, lengths[group].max(0).tolist(), side, reach))
    if len(groups) == 1:
        return resized[0]
    back = np.argsort(np.concatenate([np.array(group) for group in groups]))
    return torch.cat(resized)[to_device(back, images[0].device)]


def _in_one_kernel(images: Sequence[Tensor], geometry: Float64s, side: int, cubic: bool) -> Tensor:
    from paceline.data.load.resample_cuda import resize  # noqa: PLC0415 - Triton comes with torch for CUDA only

    device = images[0].device
    solid = [image.contiguous() for image in images]
    addresses = to_device(torch.tensor([image.data_ptr() for image in solid]), device)
    return resize(addresses, to_device(geometry.astype(np.float32), device), side, cubic)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _together(lengths: Int64s) -> Iterator[list[int]]:
    """All images together where that is not too much, else groups of images of similar size."""
    if len(lengths) * int(lengths.max(0).prod()) <= PIXELS_AT_ONCE:
        yield list(range(len(lengths)))
        return
    group: list[int] = []
    height = width = 0
    for index in np.argsort(lengths.prod(1)).tolist():
        height, width = max(height, int(lengths[index, 0])), max(width, int(lengths[index, 1]))
        if group and (len(group) + 1) * height * width > PIXELS_AT_ONCE:
            yield group
            group, (height, width) = [], lengths[index].tolist()
        group.append(index)
    yield group


def _weights(geometry: Tensor, axis: int, length: int, side: int, reach: float) -> Tensor:
    """How much of each pixel of a row (or column) goes into each new pixel: [image, new pixel, pixel]."""
    start, first, count, scale = (geometry[:, column + axis, None, None] for column in (0, 2, 4, 6))
    pixels = torch.arange(length, dtype=geometry.dtype, device=geometry.device)
    center = start + (torch.arange(side, dtype=geometry.dtype, device=geometry.device)[:, None] + 0.5) * scale
    distance = (first + pixels + 0.5 - center).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp(min=0) if reach == 1.0 else _cubic(distance)
    weights = torch.where(pixels < count, weights, 0)
    return (weights / weights.sum(2, keepdim=True)).to(torch.float32)


def _cubic(x: Tensor) -> Tensor:
    """Keys's cubic with a = -1/2, as Pillow and torch have it when they see every pixel."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _product(windows: list[Tensor], geometry: Tensor, largest: list[int], side: int, reach: float) -> Tensor:
    """The windows, side by side in memory, times the weights of rows and columns."""
    wide = torch.zeros((len(windows), len(windows[0]), *largest), dtype=torch.float32, device=geometry.device)
    for slot, window in zip(wide, windows, strict=True):
        slot[:, : window.shape[1], : window.shape[2]] = window
    rows, columns = (_weights(geometry, axis, largest[axis], side, reach) for axis in (0, 1))
    columns = torch.where(geometry[:, -1, None, None] > 0, columns.flip(1), columns)
    resized = rows[:, None] @ (wide @ columns.transpose(1, 2)[:, None])
    return resized.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
