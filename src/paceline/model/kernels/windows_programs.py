"""Triton programs for maxima and means over windows; windows_triton.py launches them.

Each works on BP pixels of the pictures that it writes, and BC of their channels.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def _pixels(total, C, H, W, BP: tl.constexpr, BC: tl.constexpr):
    """The image, row and column of this program's pixels, its channels, and which of all these there are."""
    o = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    return o // (H * W), o // W % H, o % W, c, (o < total)[:, None] & (c < C)[None, :]


@triton.jit
def _at(n, row, column, c, H, W, C):
    return ((n * H + row).to(tl.int64) * W + column)[:, None] * C + c[None, :]


@triton.jit(do_not_specialize=["total", "H", "W", "OH", "OW"])
def max_windows_of_tile(
    x, y, place, total, H, W, OH, OW, C: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The first of the largest numbers of each window, as torch has it; NaN is larger than all others."""
    n, row, column, c, inside = _pixels(total, C, OH, OW, BP, BC)
    best = tl.full([BP, BC], float("-inf"), tl.float32)
    found = tl.zeros([BP, BC], tl.int32)
    for k in tl.static_range(SIZE * SIZE):
        ih = row * STRIDE - PADDING + k // SIZE
        iw = column * STRIDE - PADDING + k % SIZE
        there = ((ih >= 0) & (ih < H) & (iw >= 0) & (iw < W))[:, None] & inside
        v = tl.load(x + _at(n, ih, iw, c, H, W, C), mask=there, other=float("-inf")).to(tl.float32)
        take = (v > best) | (v != v)  # noqa: PLR0124 - NaN is not itself
        best = tl.where(take, v, best)
        found = tl.where(take, k, found)
    to = _at(n, row, column, c, OH, OW, C)
    tl.store(y + to, best.to(y.dtype.element_ty), mask=inside)
    tl.store(place + to, found.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["total", "H", "W", "OH", "OW"])
def max_gradient_of_tile(
    dy, place, dx, total, H, W, OH, OW, C: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, REACH: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sum over the windows that a pixel is the largest of; at most REACH lie over it either way."""
    n, row, column, c, inside = _pixels(total, C, H, W, BP, BC)
    z = tl.zeros([BP, BC], tl.float32)
    for k in tl.static_range(REACH * REACH):
        oh = (row + PADDING) // STRIDE - k // REACH
        ow = (column + PADDING) // STRIDE - k % REACH
        kh = row + PADDING - oh * STRIDE
        kw = column + PADDING - ow * STRIDE
        covered = (oh >= 0) & (oh < OH) & (kh < SIZE) & (ow >= 0) & (ow < OW) & (kw < SIZE)
        there = covered[:, None] & inside
        at = _at(n, oh, ow, c, OH, OW, C)
        d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        found = tl.load(place + at, mask=there, other=-1).to(tl.int32)
        z += tl.where(found == (kh * SIZE + kw)[:, None], d, 0.0)
    tl.store(dx + _at(n, row, column, c, H, W, C), z.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _covered(row, column, H, W, SIZE: tl.constexpr):
    """How many pixels of the picture the squares around these have."""
    high = tl.minimum(row + SIZE // 2, H - 1) - tl.maximum(row - SIZE // 2, 0) + 1
    wide = tl.minimum(column + SIZE // 2, W - 1) - tl.maximum(column - SIZE // 2, 0) + 1
    return (high * wide).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["total", "H", "W"])
def means_of_tile(
    x, y, total, H, W, C: tl.constexpr,
    SIZE: tl.constexpr, INNER: tl.constexpr, BACKWARD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The mean of the square around each pixel; BACKWARD divides each number by the pixels of its own square."""
    n, row, column, c, inside = _pixels(total, C, H, W, BP, BC)
    s = tl.zeros([BP, BC], tl.float32)
    for k in tl.static_range(SIZE * SIZE):
        ih = row - SIZE // 2 + k // SIZE
        iw = column - SIZE // 2 + k % SIZE
        there = ((ih >= 0) & (ih < H) & (iw >= 0) & (iw < W))[:, None] & inside
        v = tl.load(x + _at(n, ih, iw, c, H, W, C), mask=there, other=0.0).to(tl.float32)
        if INNER and BACKWARD:
            v = v / tl.maximum(_covered(ih, iw, H, W, SIZE), 1.0)
        s += v
    if not INNER:
        s = s / (SIZE * SIZE)
    elif not BACKWARD:
        s = s / _covered(row, column, H, W, SIZE)
    tl.store(y + _at(n, row, column, c, H, W, C), s.to(y.dtype.element_ty), mask=inside)
