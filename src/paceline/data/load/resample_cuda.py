"""`resample` as one Triton kernel, which reads every image where it lies instead of copying them together first."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

GEOMETRY = tl.constexpr(11)
"""How many numbers describe a box, see `resample`."""


@triton.jit  # type: ignore[untyped-decorator]
def _weight(distance, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803 - constant when compiled
    x = tl.abs(distance)
    if CUBIC:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        weight = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    else:
        weight = tl.maximum(1.0 - x, 0.0)
    return weight


@triton.jit  # type: ignore[untyped-decorator]
def _resize(images, geometry, resized, side, CUBIC: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One row of one resized image."""
    index, y = tl.program_id(0), tl.program_id(1)
    image = tl.load(images + index).to(tl.pointer_type(tl.uint8))
    facts = geometry + index * GEOMETRY
    top, left, first_row, first_column = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2), tl.load(facts + 3)
    end_row, end_column = first_row + tl.load(facts + 4), first_column + tl.load(facts + 5)
    down, across, flipped = tl.load(facts + 6), tl.load(facts + 7), tl.load(facts + 8)
    height, width = tl.load(facts + 9).to(tl.int64), tl.load(facts + 10).to(tl.int64)
    reach = 2.0 if CUBIC else 1.0
    wide_y, wide_x = tl.maximum(down, 1.0), tl.maximum(across, 1.0)
    x = tl.arange(0, BLOCK)
    source = tl.where(flipped > 0.0, side - 1 - x, x)
    center_y, center_x = top + (y + 0.5) * down, left + (source + 0.5) * across
    begin_y = tl.maximum(tl.floor(center_y - reach * wide_y), first_row)
    begin_x = tl.maximum(tl.floor(center_x - reach * wide_x), first_column)
    rows = tl.minimum(tl.ceil(2.0 * reach * wide_y) + 1.0, end_row - begin_y).to(tl.int32)
    columns = (tl.ceil(2.0 * reach * wide_x) + 1.0).to(tl.int32)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plane = height * width
    for j in range(rows):
        row = begin_y + j
        weight_y = _weight((row + 0.5 - center_y) / wide_y, CUBIC)
        line = image + row.to(tl.int64) * width
        for i in range(columns):
            column = begin_x + i
            seen = (column < end_column) & (x < side)
            weight = tl.where(seen, weight_y * _weight((column + 0.5 - center_x) / wide_x, CUBIC), 0.0)
            at = line + column.to(tl.int64)
            red += weight * tl.load(at, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(at + plane, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * plane, mask=seen, other=0).to(tl.float32)
            total += weight
    out = resized + ((index.to(tl.int64) * side + y) * side + x) * 3
    scale = 1.0 / tl.where(x < side, total, 1.0)
    tl.store(out, _rounded(red * scale), mask=x < side)
    tl.store(out + 1, _rounded(green * scale), mask=x < side)
    tl.store(out + 2, _rounded(blue * scale), mask=x < side)


@triton.jit
def _rounded(value):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0).to(tl.uint8)


def resize(images: Tensor, geometry: Tensor, side: int, cubic: bool) -> Tensor:
    """Resized images; `images` holds the addresses of contiguous 8-bit ones (three channels, height, width)."""
    resized = torch.empty((len(images), side, side, 3), dtype=torch.uint8, device=images.device)
    block = triton.next_power_of_2(side)
    _resize[(len(images), side)](images, geometry, resized, side, CUBIC=cubic, BLOCK=block)
    return resized
