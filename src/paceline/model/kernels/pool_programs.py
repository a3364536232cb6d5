"""Triton programs for the norm, ReLU and max-pool of a stem; pool_triton.py launches them."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit(do_not_specialize=["total", "H", "W"])
def unshuffle_program(
    x, y, total, H, W, sn, sh, sw, sc, CHANNELS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK pixels of the pictures that `unshuffle` gives."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, OUT)
    height = H // 2 + 3
    width = W // 2 + 3
    n = o // (height * width)
    row = o // width % height
    column = o % width
    channel = c // 4
    ih = row[:, None] * 2 + (c % 4 // 2)[None, :] - 4
    iw = column[:, None] * 2 + (c % 2)[None, :] - 4
    there = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (channel < CHANNELS)[None, :] & (o < total)[:, None]
    at = x + n[:, None].to(tl.int64) * sn + ih * sh + iw * sw + channel[None, :] * sc
    v = tl.load(at, mask=there, other=0.0)
    tl.store(y + o[:, None].to(tl.int64) * OUT + c[None, :], v.to(y.dtype.element_ty), mask=(o < total)[:, None])


@triton.jit(do_not_specialize=["total", "rows", "H", "W"])
def pool_forward_program(
    x, y, position, top, scale, shift, total, rows, H, W, C: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr
):
    """BLOCK pixels of the pool; a norm group has `rows` of them. KEEP leaves what a backward pass needs."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    height = H // 2
    width = W // 2
    n = o // (height * width)
    row = o // width % height
    column = o % width
    group = (o // rows)[:, None] * C + c[None, :]
    inside = (o < total)[:, None]
    a = tl.load(scale + group, mask=inside, other=0.0)
    b = tl.load(shift + group, mask=inside, other=0.0)
    best = tl.zeros([BLOCK, C], tl.float32)
    # Where nothing in the window is positive, the pixel in the middle stands for it: it is not positive either.
    middle = ((n * H + row * 2).to(tl.int64) * W + column * 2)[:, None] * C + c[None, :]
    raw = tl.load(x + middle, mask=inside, other=0.0).to(tl.float32)
    place = tl.full([BLOCK, C], -1, tl.int8)
    for k in tl.static_range(9):
        ih = row * 2 - 1 + k // 3
        iw = column * 2 - 1 + k % 3
        there = ((ih >= 0) & (iw >= 0))[:, None] & inside
        v = tl.load(x + ((n * H + ih).to(tl.int64) * W + iw)[:, None] * C + c[None, :], mask=there, other=0.0)
        f = v.to(tl.float32)
        act = tl.where(there, f * a + b, 0.0)
        take = act > best
        best = tl.where(take, act, best)
        raw = tl.where(take, f, raw)
        place = tl.where(take, k, place).to(tl.int8)
    to = o[:, None].to(tl.int64) * C + c[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(top + to, raw.to(top.dtype.element_ty), mask=inside)
        tl.store(position + to, place, mask=inside)


@triton.jit
def _window(dy, position, n, row, column, c, height, width, C: tl.constexpr):
    there = ((row < height) & (column < width))[:, None]
    at = ((n * height + row).to(tl.int64) * width + column)[:, None] * C + c[None, :]
    d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    return d, tl.load(position + at, mask=there, other=-1)


@triton.jit(do_not_specialize=["total", "rows", "H", "W"])
def pool_backward_program(dy, position, x, dx, a, b, cs, total, rows, H, W, C: tl.constexpr, BLOCK: tl.constexpr):
    """The four pixels of BLOCK pairs of rows and columns; a norm group has `rows` of them."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    height = H // 2
    width = W // 2
    o = tl.minimum(o, total - 1)  # what lies beyond the last is computed twice
    n = o // (height * width)
    row = o // width % height
    column = o % width
    group = (o // rows)[:, None] * C + c[None, :]
    fa = tl.load(a + group)
    fb = tl.load(b + group)
    fc = tl.load(cs + group)
    d00, p00 = _window(dy, position, n, row, column, c, height, width, C)
    d01, p01 = _window(dy, position, n, row, column + 1, c, height, width, C)
    d10, p10 = _window(dy, position, n, row + 1, column, c, height, width, C)
    d11, p11 = _window(dy, position, n, row + 1, column + 1, c, height, width, C)
    at = ((n * H + row * 2).to(tl.int64) * W + column * 2)[:, None] * C + c[None, :]
    for k in tl.static_range(4):
        # The windows of the pool that a pixel lies in, each of which has it at another place.
        if k == 0:
            z = tl.where(p00 == 4, d00, 0.0)
        elif k == 1:
            z = tl.where(p00 == 5, d00, 0.0) + tl.where(p01 == 3, d01, 0.0)
        elif k == 2:
            z = tl.where(p00 == 7, d00, 0.0) + tl.where(p10 == 1, d10, 0.0)
        else:
            z = tl.where(p00 == 8, d00, 0.0) + tl.where(p01 == 6, d01, 0.0)
            z += tl.where(p10 == 2, d10, 0.0) + tl.where(p11 == 0, d11, 0.0)
        off = at + (k // 2 * W + k % 2) * C
        v = tl.load(x + off).to(tl.float32)
        tl.store(dx + off, (fa * z + fb * v + fc).to(dx.dtype.element_ty))
