"""The operations of expand.py on a CUDA device, by Triton kernels that add nothing atomically."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels import product_triton
from paceline.model.kernels.expand_programs import expansion_gradient_program, expansion_sums_program
from paceline.model.kernels.gram import WidenedGradient
from paceline.model.kernels.gram_triton import floats, part_count, sum_parts
from paceline.model.kernels.rows_triton import MULTIPROCESSORS
from paceline.model.kernels.tiles import Tile
from paceline.settings.model import Activation

SUMS, SMALL, LARGE = Tile(64, 64, 0, 4, 2), Tile(128, 32, 0, 4, 3), Tile(128, 64, 0, 8, 2)
"""The parts of the wide gradient that a program has at a time, for sums and for gradients of few and of many narrow
channels. They were chosen by the instructions and registers that they compile to."""
MANY = 64
"""More narrow channels than this are many."""


def expanded(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None) -> Tensor:
    """act((x W^T) scale + shift)."""
    tile = product_triton.NARROW._replace(inner=32 if x.shape[2] <= 32 else 64)
    return product_triton.product_act(x, weight, scale, shift, activation, None, tile)


def expansion_sums(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None
) -> tuple[Tensor, Tensor]:
    """dz^T x and the sums of dz of each group, dz being the gradient before the activation; see the twin."""
    (groups, rows, c), n = x.shape, len(weight)
    assert all(each.is_contiguous() for each in (dy, x, weight, scale, shift))
    t, resident = SUMS, 2 if c > MANY else 3
    tiles, blocks = triton.cdiv(rows, t.rows), triton.cdiv(n, t.columns)
    parts = part_count(groups * blocks, tiles, MULTIPROCESSORS * resident)
    padded = _padded(c + 1 if c < MANY else c)  # with room for a column of ones
    products, sums = floats(x, groups, parts, n, c), floats(x, groups, parts, n)
    expansion_sums_program[(parts * blocks, groups)](
        dy, x, weight, scale, shift, products, sums, rows, tiles, parts, n, c, padded, activation,
        t.rows, t.columns, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return sum_parts(products), sum_parts(sums)


def expansion_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    gradient: WidenedGradient,
) -> Tensor:  # fmt: skip
    """The gradient of x: dz A + x Q + c; see the twin."""
    (groups, rows, c), n = x.shape, len(weight)
    assert all(each.is_contiguous() for each in (dy, x, weight, scale, shift, gradient.a, gradient.q, gradient.c))
    dx, t = torch.empty_like(x), LARGE if c > MANY else SMALL
    expansion_gradient_program[(triton.cdiv(rows, t.rows), groups)](
        dy, x, weight, scale, shift, gradient.a, gradient.q, gradient.c, dx, rows, n, c, _padded(c), activation,
        t.rows, t.columns, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return dx


def _padded(channels: int) -> int:
    """The number of channels in a tile, which is a power of two."""
    return max(16, int(triton.next_power_of_2(channels)))
