"""Triton programs of a widening 1x1 convolution's backward pass; expand_triton.py launches them.

Each computes again what the convolution and its norm gave, so that nothing wide is read but the gradient.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from paceline.model.kernels.gram_programs import tile_rows
from paceline.model.kernels.rows_programs import behind


@triton.jit
def _gradient_before(
    d, x, w, scale, shift, inside, cols, own, N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    ACTIVATION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dz of a tile in the type of x, whose rows are given; d is where the tile's rows begin."""
    there = cols < N
    r = tl.arange(0, BM)
    c = tl.arange(0, CP)
    g = tl.load(d + r[:, None] * N + cols[None, :], mask=inside[:, None] & there[None, :], other=0.0)
    weight = tl.load(w + cols[None, :] * C + c[:, None], mask=own[:, None] & there[None, :], other=0.0)
    z = tl.dot(x, weight) * tl.load(scale + cols, mask=there, other=0.0)[None, :]
    z += tl.load(shift + cols, mask=there, other=0.0)[None, :]
    return behind(g.to(tl.float32), z, ACTIVATION).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def expansion_sums_program(
    dy, x, w, scale, shift, products, sums, rows, tiles, P, N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For BN columns, dz^T x and the sums of dz over the program's rows."""
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    cols = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
    p = tl.program_id(0) // BLOCKS
    group = tl.program_id(1)
    there = cols < N
    c = tl.arange(0, CP)
    own = c < C
    s = tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, CP], tl.float32)
    for t in range(p, tiles, P):
        inside = tl.arange(0, BM) < rows - t * BM
        at = tile_rows(x, group, t, rows, C, BM) + tl.arange(0, BM)[:, None] * C + c[None, :]
        a = tl.load(at, mask=inside[:, None] & own[None, :], other=0.0)
        if C < CP:  # a column of ones gives the sums
            a = tl.where(c[None, :] == C, 1.0, a).to(a.dtype)
        d = tile_rows(dy, group, t, rows, N, BM)
        dz = _gradient_before(
            d, a, w, scale + group * N, shift + group * N, inside, cols, own, N, C, CP, ACTIVATION, BM
        )
        if C == CP:
            s += tl.sum(dz.to(tl.float32), 0)
        acc = tl.dot(tl.trans(dz), a, acc)
    if C < CP:
        s = tl.sum(tl.where(c[None, :] == C, acc, 0.0), 1)
    to = (group * P + p).to(tl.int64) * N + cols
    tl.store(products + to[:, None] * C + c[None, :], acc, mask=there[:, None] & own[None, :])
    tl.store(sums + to, s, mask=there)


@triton.jit(do_not_specialize=["rows"])
def expansion_gradient_program(
    dy, x, w, scale, shift, am, qm, constants, dx, rows, N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dz am + x qm + constants, for BM rows."""
    t = tl.program_id(0)
    group = tl.program_id(1)
    inside = tl.arange(0, BM) < rows - t * BM
    c = tl.arange(0, CP)
    own = c < C
    off = tl.arange(0, BM)[:, None] * C + c[None, :]
    seen = inside[:, None] & own[None, :]
    a = tl.load(tile_rows(x, group, t, rows, C, BM) + off, mask=seen, other=0.0)
    q = tl.load(qm + group * C * C + c[:, None] * C + c[None, :], mask=own[:, None] & own[None, :], other=0.0)
    acc = tl.dot(a, q) + tl.load(constants + group * C + c, mask=own, other=0.0)[None, :]
    d = tile_rows(dy, group, t, rows, N, BM)
    for n in range(0, N, BN):
        cols = n + tl.arange(0, BN)
        dz = _gradient_before(
            d, a, w, scale + group * N, shift + group * N, inside, cols, own, N, C, CP, ACTIVATION, BM
        )
        to_narrow = tl.load(
            am + (group * N + cols)[:, None] * C + c[None, :], mask=(cols < N)[:, None] & own[None, :], other=0.0
        )
        acc = tl.dot(dz, to_narrow, acc)
    tl.store(tile_rows(dx, group, t, rows, C, BM) + off, acc.to(dx.dtype.element_ty), mask=seen)
