"""Triton programs of 3x3 convolutions in float32; convolution_triton.py launches them.

Tensor cores multiply numbers of 11 bits. So each number is taken as the sum of two such, and three of the four products
are added up: what is missing is about as small as float32's rounding.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _pixel(image, line, column, inside, H, W):
    """The number of a pixel, and whether it is in the picture."""
    inside = inside & (line >= 0) & (line < H) & (column >= 0) & (column < W)
    return (image * H + line).to(tl.int64) * W + column, inside


@triton.jit(do_not_specialize=["rows", "H", "W", "OH", "OW"])
def convolution_program(
    x, w, y, rows, H, W, OH, OW, C: tl.constexpr, N: tl.constexpr,
    STRIDE: tl.constexpr, BACKWARD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM pixels of y, which has N channels and the sides OH and OW, by pictures of C channels and weights [N, 3, 3, C].

    BACKWARD: y is the gradient of a convolution's input, x that of its output, and the weights are those with inputs
    and outputs exchanged.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = row % OW
    line = row // OW % OH
    image = row // (OW * OH)
    c = tl.arange(0, C)
    n = tl.arange(0, N)
    acc = tl.zeros([BM, N], tl.float32)
    for tap in range(9):
        inside = row < rows
        if BACKWARD:
            down = line + 1 - tap // 3
            right = column + 1 - tap % 3
            inside = inside & (down % STRIDE == 0) & (right % STRIDE == 0)
            at, inside = _pixel(image, down // STRIDE, right // STRIDE, inside, H, W)
        else:
            at, inside = _pixel(image, line * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1, inside, H, W)
        a = tl.load(x + at[:, None] * C + c[None, :], mask=inside[:, None], other=0.0)
        acc = _dot(a, tl.load(w + n[None, :] * (9 * C) + tap * C + c[:, None]), acc)
    tl.store(y + row.to(tl.int64)[:, None] * N + n[None, :], acc, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "H", "W", "OH", "OW", "tiles", "P"])
def weight_gradient_program(
    x, dy, parts, rows, H, W, OH, OW, tiles, P, C: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr
):
    """The program's part of the gradient of weights [N, 3, 3, C], for one line of the three."""
    p = tl.program_id(0)
    above = tl.program_id(1)
    j = tl.arange(0, 4 * C)  # a fourth column, which is not there, makes it a power of two
    beside = j // C
    c = j % C
    n = tl.arange(0, N)
    acc = tl.zeros([4 * C, N], tl.float32)
    for t in range(p, tiles, P):
        row = t * BM + tl.arange(0, BM)
        line = row // OW % OH * STRIDE + above - 1
        column = (row % OW * STRIDE)[None, :] + beside[:, None] - 1
        inside = (row < rows)[None, :] & (beside < 3)[:, None]
        at, inside = _pixel((row // (OW * OH))[None, :], line[None, :], column, inside, H, W)
        a = tl.load(x + at * C + c[:, None], mask=inside, other=0.0)
        g = tl.load(dy + row.to(tl.int64)[:, None] * N + n[None, :], mask=(row < rows)[:, None], other=0.0)
        acc = _dot(a, g, acc)
    to = parts + p.to(tl.int64) * (9 * C * N) + n[None, :] * (9 * C) + (above * 3 + beside[:, None]) * C + c[:, None]
    tl.store(to, acc, mask=(beside < 3)[:, None])
