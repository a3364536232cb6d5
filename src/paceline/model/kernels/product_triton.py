"""The operation of product.py on a CUDA device, by a Triton kernel with a choice of tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.kernels.product_programs import product_act_program
from paceline.model.kernels.tiles import Tile
from paceline.settings.model import Activation

WIDE, LARGE = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3)
NARROW, SMALL = Tile(128, 64, 64, 4, 3), Tile(16, 64, 128, 4, 3)
FEW_ROWS = 4096
"""Up to so many rows, small tiles give more multiprocessors something to do."""


def suitable_tiles(rows: int, columns: int) -> list[Tile]:
    """The tiles that may be the fastest for a product of this shape."""
    if rows <= FEW_ROWS:
        return [NARROW, SMALL] if rows > 512 else [SMALL]
    return [NARROW, *(tile for tile in (LARGE, WIDE) if columns > tile.columns // 2)]


def product_act(
    a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, shortcut: Tensor | None,
    tile: Tile,
) -> Tensor:  # fmt: skip
    """act(a W^T scale + shift + shortcut); see the twin."""
    (groups, rows, inputs), outputs = a.shape, len(weight)
    assert inputs % 8 == outputs % 8 == 0
    assert all(each is None or each.is_contiguous() for each in (a, weight, scale, shift, shortcut))
    y = torch.empty((groups, rows, outputs), dtype=a.dtype, device=a.device)
    programs = -(-rows // tile.rows) * -(-outputs // tile.columns)
    product_act_program[(programs, groups)](
        a, weight, scale, shift, shortcut, y, rows, outputs // 8, inputs // 8,
        ACTIVATION=activation, SHORTCUT=shortcut is not None, BM=tile.rows, BN=tile.columns, BK=tile.inner,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
