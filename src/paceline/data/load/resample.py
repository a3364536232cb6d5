"""Boxes of many pictures of many sizes, resized to one size in a few kernels, on any device."""

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

NUMBERS_AT_ONCE = 1 << 25
"""About how many numbers are resized together: small boxes lie in rows as wide as the widest beside them."""


def resample(
    pictures: Sequence[Tensor], boxes: NDArray[Any], mirrored: NDArray[np.bool_], side: int,
    filter: Literal["bilinear", "bicubic"], inside: bool,
) -> Tensor:  # fmt: skip
    """Square 8-bit pictures (side, side, channel) of what boxes (top, left, height, width) of others (channel, height,
    width) hold, antialiased. With `inside`, pixels outside a box are never seen, as if it had been cut out first."""
    reach = 1.0 if filter == "bilinear" else 2.0
    start, size = boxes[:, :2].astype(np.float64), boxes[:, 2:].astype(np.float64)
    scales = size / side
    support = reach * np.maximum(scales, 1)
    limits = np.array([picture.shape[1:] for picture in pictures], np.float64)
    first = np.maximum(np.floor(start + 0.5 * scales - support), start if inside else 0)
    last = np.minimum(np.ceil(start + size - 0.5 * scales + support), start + size if inside else limits)
    lengths = (last - first).astype(np.int64)
    known = np.concatenate([start, first, lengths, scales, mirrored[:, None]], 1)
    if pictures[0].is_cuda and _has_triton():
        return _in_one_kernel(pictures, np.concatenate([known, limits], 1), side, filter == "bicubic")
    corners = np.concatenate([first, first + lengths], 1).astype(np.int64).tolist()
    windows = [picture[:, t:b, x:r] for picture, (t, x, b, r) in zip(pictures, corners, strict=True)]
    groups, made = list(_together(lengths)), []
    for few in groups:
        # What is known of each box goes to the device in one piece; the weights, which are many, are made there.
        sent = to_device(known[few], pictures[0].device)
        made.append(_product([windows[i] for i in few], sent, lengths[few].max(0).tolist(), side, reach))
    if len(groups) == 1:
        return made[0]
    back = np.argsort(np.concatenate([np.array(few) for few in groups]))
    return torch.cat(made)[to_device(back, pictures[0].device)]


def _in_one_kernel(pictures: Sequence[Tensor], known: NDArray[np.float64], side: int, cubic: bool) -> Tensor:
    from paceline.data.load.resample_cuda import resize  # noqa: PLC0415 - Triton comes with torch for CUDA only

    device = pictures[0].device
    solid = [picture.contiguous() for picture in pictures]
    places = to_device(torch.tensor([picture.data_ptr() for picture in solid]), device)
    return resize(places, to_device(known.astype(np.float32), device), side, cubic)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _together(lengths: NDArray[np.int64]) -> Iterator[list[int]]:
    """The pictures as they come where they are not too large together, else in groups of similar size."""
    if len(lengths) * int(lengths.max(0).prod()) <= NUMBERS_AT_ONCE:
        yield list(range(len(lengths)))
        return
    group: list[int] = []
    height = width = 0
    for number in np.argsort(lengths.prod(1)).tolist():
        height, width = max(height, int(lengths[number, 0])), max(width, int(lengths[number, 1]))
        if group and (len(group) + 1) * height * width > NUMBERS_AT_ONCE:
            yield group
            group, (height, width) = [], lengths[number].tolist()
        group.append(number)
    yield group


def _weights(known: Tensor, axis: int, length: int, side: int, reach: float) -> Tensor:
    """How much of each pixel of a row (or column) goes into each new pixel: picture, new pixel, pixel."""
    start, first, count, scale = (known[:, column + axis, None, None] for column in (0, 2, 4, 6))
    places = torch.arange(length, dtype=known.dtype, device=known.device)
    center = start + (torch.arange(side, dtype=known.dtype, device=known.device)[:, None] + 0.5) * scale
    distance = (first + places + 0.5 - center).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp(min=0) if reach == 1.0 else _cubic(distance)
    weights = torch.where(places < count, weights, 0)
    return (weights / weights.sum(2, keepdim=True)).to(torch.float32)


def _cubic(x: Tensor) -> Tensor:
    """Keys's cubic with a = -1/2, as Pillow and torch have it when they see every pixel."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _product(windows: list[Tensor], known: Tensor, largest: list[int], side: int, reach: float) -> Tensor:
    """The windows, side by side in memory, times the weights of rows and columns."""
    wide = torch.zeros((len(windows), len(windows[0]), *largest), dtype=torch.float32, device=known.device)
    for slot, window in zip(wide, windows, strict=True):
        slot[:, : window.shape[1], : window.shape[2]] = window
    rows, columns = (_weights(known, axis, largest[axis], side, reach) for axis in (0, 1))
    columns = torch.where(known[:, -1, None, None] > 0, columns.flip(1), columns)
    made = rows[:, None] @ (wide @ columns.transpose(1, 2)[:, None])
    return made.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
