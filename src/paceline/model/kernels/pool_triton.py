"""The operations of pool.py on a CUDA device, by Triton kernels."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels.pool_programs import pool_backward_program, pool_forward_program, unshuffle_program


def unshuffle(images: Tensor, dtype: torch.dtype, channels: int) -> Tensor:
    """Pictures of half the side with the channels of four pixels each; see the twin."""
    count, own, height, width = images.shape
    shape = (count, channels, height // 2 + 3, width // 2 + 3)
    y = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    total = y.numel() // channels
    sn, sc, sh, sw = images.stride()
    unshuffle_program[(triton.cdiv(total, 64),)](
        images, y, total, height, width, sn, sh, sw, sc, own, channels, 64, num_warps=4
    )
    return y


def pool_forward(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pool of relu(x scale + shift), where each number comes from, and what x is there; see the twin."""
    count, channels, height, width = x.shape
    shape = (count, channels, height // 2, width // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    position, top = torch.empty_like(y, dtype=torch.int8), torch.empty_like(y)
    total = y.numel() // channels
    block = 1024 // channels
    pool_forward_program[(triton.cdiv(total, block),)](
        x, y, position, top, scale, shift, total, total // len(scale), height, width, channels, block, num_warps=4
    )
    return y, position, top


def pool_backward(dy: Tensor, position: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a z + b x + c, where z is the gradient of the pixels; see the twin."""
    _, channels, height, width = x.shape
    dx, total, block = torch.empty_like(x), dy.numel() // channels, 1024 // channels
    pool_backward_program[(triton.cdiv(total, block),)](
        dy, position, x, dx, a, b, c, total, total // len(a), height, width, channels, block, num_warps=4
    )
    return dx
