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
    y = _halved(x)
    position, top = torch.empty_like(y, dtype=torch.int8), torch.empty_like(y)
    _pool(x, y, position, top, scale, shift)
    return y, position, top


def pool_alone(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The pool of relu(x scale + shift) alone, for an evaluation; see the twin."""
    y = _halved(x)
    _pool(x, y, None, None, scale, shift)
    return y


def _halved(x: Tensor) -> Tensor:
    """Room for pictures of half the side."""
    count, channels, height, width = x.shape
    shape = (count, channels, height // 2, width // 2)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _pool(x: Tensor, y: Tensor, position: Tensor | None, top: Tensor | None, scale: Tensor, shift: Tensor) -> None:
    _, channels, height, width = x.shape
    total, block = y.numel() // channels, 1024 // channels
    pool_forward_program[(triton.cdiv(total, block),)](
        x, y, position, top, scale, shift, total, total // len(scale), height, width, channels, block,
        KEEP=top is not None, num_warps=4,
    )  # fmt: skip


def pool_backward(dy: Tensor, position: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a z + b x + c, where z is the gradient of the pixels; see the twin."""
    _, channels, height, width = x.shape
    dx, total, block = torch.empty_like(x), dy.numel() // channels, 1024 // channels
    pool_backward_program[(triton.cdiv(total, block),)](
        dy, position, x, dx, a, b, c, total, total // len(a), height, width, channels, block, num_warps=4
    )
    return dx
