"""Norm, ReLU and 3x3 max-pool of stride 2 behind a stem's convolution, in plain torch: the twins of pool_triton.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def unshuffle(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """Pictures of half the side, each pixel of which has the channels of four, behind a border of 4 pixels before and 2
    after them; filled up with zeros to so many channels, in channels-last order."""
    y = F.pixel_unshuffle(F.pad(images.to(dtype), (4, 2, 4, 2)), 2)
    y = F.pad(y, (0, 0, 0, 0, 0, channels - y.shape[1]))
    return y.contiguous(memory_format=torch.channels_last)


def pool_forward(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pool of relu(x scale + shift); which pixel each number comes from, -1 where it is zero; and what x is there.

    Scale and shift are [norm groups, channels]; the groups have the same number of images each.
    """
    images = len(x) // len(scale)
    scale, shift = (v.repeat_interleave(images, 0)[:, :, None, None].to(scale.dtype) for v in (scale, shift))
    act = torch.relu(x.to(scale.dtype) * scale + shift)
    y, position = F.max_pool2d(act, 3, 2, 1, return_indices=True)
    top = x.flatten(2).gather(2, position.flatten(2)).view(y.shape)
    layout = torch.channels_last
    return (
        y.to(x.dtype).contiguous(memory_format=layout),
        torch.where(y > 0, position, -1).contiguous(memory_format=layout),
        top.contiguous(memory_format=layout),
    )


def pool_alone(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The pool of relu(x scale + shift) alone, for an evaluation."""
    return pool_forward(x, scale, shift)[0]


def pool_backward(dy: Tensor, position: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a z + b x + c, where z is the gradient of the pixels, which each dy reaches at its position."""
    wide = a.dtype
    z = torch.zeros(x.shape, dtype=wide, device=x.device).flatten(2)
    z.scatter_add_(2, position.clamp_min(0).flatten(2), torch.where(position >= 0, dy.to(wide), 0).flatten(2))
    images = len(x) // len(a)
    a, b, c = (v.repeat_interleave(images, 0)[:, :, None, None] for v in (a, b, c))
    return (a * z.view(x.shape) + b * x.to(wide) + c).to(x.dtype).contiguous(memory_format=torch.channels_last)
