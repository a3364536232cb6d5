"""The operations of windows.py on a CUDA device, by Triton kernels that gather and never add atomically."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels import windows_programs as programs
from paceline.model.kernels.windows import Window

ELEMENTS = 1024
"""How many numbers a program computes: one load of 16 bytes in bfloat16 for each thread of four warps."""


def max_windows(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and its place in the window; see the twin."""
    count, channels, height, width = x.shape
    size, stride, padding, _ = window
    shape = (count, channels, window.count(height), window.count(width))
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    place = torch.empty_like(y, dtype=torch.int8)
    grid, tile = _cut(y)
    programs.max_windows_of_tile[grid](
        x, y, place, y.numel() // channels, height, width, *shape[2:], channels,
        SIZE=size, STRIDE=stride, PADDING=padding, **tile, num_warps=4,
    )  # fmt: skip
    return y, place


def max_windows_gradient(dy: Tensor, place: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The gradient of pictures of a shape by that of their largest numbers; see the twin."""
    assert dy.is_contiguous(memory_format=torch.channels_last)
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    grid, tile = _cut(dx)
    programs.max_gradient_of_tile[grid](
        dy, place, dx, dx.numel() // shape[1], *shape[2:], *dy.shape[2:], shape[1],
        SIZE=window.size, STRIDE=window.stride, PADDING=window.padding,
        REACH=-(-window.size // window.stride), **tile, num_warps=4,
    )  # fmt: skip
    return dx


def mean_windows(x: Tensor, size: int, inner: bool) -> Tensor:
    """The mean over the square around each pixel; see the twin."""
    return _means(x, size, inner, backward=False)


def mean_windows_gradient(dy: Tensor, size: int, inner: bool) -> Tensor:
    """The gradient of the pictures by that of their means; see the twin."""
    return _means(dy, size, inner, backward=True)


def _means(x: Tensor, size: int, inner: bool, *, backward: bool) -> Tensor:
    assert x.is_contiguous(memory_format=torch.channels_last)
    y, (_, channels, height, width) = torch.empty_like(x), x.shape
    grid, tile = _cut(y)
    programs.means_of_tile[grid](
        x, y, y.numel() // channels, height, width, channels,
        SIZE=size, INNER=inner, BACKWARD=backward, **tile, num_warps=4,
    )  # fmt: skip
    return y


def _cut(y: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """How programs share a tensor: pixels times columns, which are channels."""
    channels = y.shape[1]
    columns = min(128, channels & -channels)  # the largest power of two that divides it
    if columns < 32:
        columns = min(64, triton.next_power_of_2(channels))
    pixels = ELEMENTS // columns
    return (triton.cdiv(y.numel() // channels, pixels), triton.cdiv(channels, columns)), {"BP": pixels, "BC": columns}
