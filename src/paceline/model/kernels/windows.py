"""Maxima and means over windows of pictures, and their gradients, in plain torch: the twins of windows_triton.py.

Pictures are [images, channels, height, width] in channels-last order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Window(NamedTuple):
    """Squares of pixels over a picture."""

    size: int
    stride: int
    padding: int = 0
    """Rows and columns around the picture that windows may cover, at most half of their size."""
    ceil: bool = False
    """Whether a last window may stick out of the picture."""

    def count(self, length: int) -> int:
        """How many windows lie side by side along so many pixels."""
        rest = length + 2 * self.padding - self.size
        count = (-(-rest // self.stride) if self.ceil else rest // self.stride) + 1
        return count - 1 if (count - 1) * self.stride >= length + self.padding else count


def max_windows(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and which pixel it comes from."""
    size, stride, padding, ceil = window
    return F.max_pool2d(x, size, stride, padding, ceil_mode=ceil, return_indices=True)


def max_windows_gradient(dy: Tensor, pixel: Tensor, shape: torch.Size, _window: Window) -> Tensor:
    """The gradient of pictures of a shape by that of their largest numbers."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    z = torch.zeros(shape, dtype=wide, device=dy.device).flatten(2)
    z.scatter_add_(2, pixel.flatten(2), dy.to(wide).flatten(2))
    return z.view(shape).to(dy.dtype).contiguous(memory_format=torch.channels_last)


def mean_windows(x: Tensor, size: int, inner: bool) -> Tensor:
    """The mean over the square around each pixel, of odd size; zeros around the picture count unless it is `inner`."""
    return F.avg_pool2d(x, size, 1, size // 2, count_include_pad=not inner)


def mean_windows_gradient(dy: Tensor, size: int, inner: bool) -> Tensor:
    """The gradient of the pictures by that of their means."""
    if inner:  # where the picture ends, a mean is of fewer pixels
        counted = mean_windows(torch.ones_like(dy[:1, :1]), size, inner=False)
        dy = dy / counted
    return mean_windows(dy, size, inner=False)
