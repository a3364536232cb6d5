"""3x3 convolutions in float32 and their gradients, by Triton kernels that add nothing atomically."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels.convolution_programs import convolution_program, weight_gradient_program
from paceline.model.kernels.gram_triton import floats, part_count, sum_parts
from paceline.model.kernels.rows_triton import MULTIPROCESSORS
from paceline.model.kernels.tiles import Tile

PICTURE_TILES = {16: Tile(128, 0, 0, 4, 3), 32: Tile(64, 0, 0, 4, 3), 64: Tile(64, 0, 0, 4, 3)}
"""The tile for a convolution by its channels, of those that go in and come out the more; and for its input's gradient.
Measured on an H200 with the shapes of a ResNet-20, as those below."""
WEIGHT_TILES = {16: Tile(64, 0, 0, 4, 3, 4), 32: Tile(64, 0, 0, 4, 3, 2), 64: Tile(32, 0, 0, 8, 2, 2)}
"""The same for the gradient of the weights."""


def convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution of pictures, with one line of zeros around them."""
    sides = [(side - 1) // stride + 1 for side in x.shape[2:]]
    return _convolved(x, weight, (len(x), len(weight), *sides), stride, backward=False)


def picture_gradient(dy: Tensor, weight: Tensor, shape: torch.Size, stride: int) -> Tensor:
    """The gradient of pictures of a shape, by that of the convolution's output."""
    return _convolved(dy, weight.transpose(0, 1), shape, stride, backward=True)


def weight_gradient(x: Tensor, dy: Tensor, stride: int) -> Tensor:
    """The gradient of the weights."""
    channels, outputs = x.shape[1], dy.shape[1]
    t, rows = WEIGHT_TILES[max(channels, outputs)], dy.numel() // outputs
    tiles = triton.cdiv(rows, t.rows)
    count = part_count(3, tiles, MULTIPROCESSORS * t.programs)
    parts = floats(x, 1, count, outputs, 3, 3, channels)
    weight_gradient_program[(count, 3)](
        x, dy, parts, rows, *x.shape[2:], *dy.shape[2:], tiles, count, channels, outputs, stride, t.rows,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return sum_parts(parts)[0].permute(0, 3, 1, 2)


def _convolved(x: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, *, backward: bool) -> Tensor:
    y = torch.empty(shape, device=x.device, memory_format=torch.channels_last)
    t, rows = PICTURE_TILES[max(x.shape[1], y.shape[1])], y.numel() // y.shape[1]
    convolution_program[(triton.cdiv(rows, t.rows),)](
        x, weight.contiguous(memory_format=torch.channels_last), y, rows, *x.shape[2:], *y.shape[2:],
        x.shape[1], y.shape[1], stride, backward, t.rows, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y
