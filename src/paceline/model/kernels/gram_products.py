"""Triton kernels for the products of a bottleneck and the norms around them; gram_triton.py launches them.

All sums are deterministic: each program leaves its own part, and a second kernel adds the parts up in float64. Sums of
squares are taken around a pivot, the mean of the program's first tile, so that they lose nothing where a channel's mean is
large, and tensor cores, which truncate, add up small numbers only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found"
# ruff: noqa: N803, N806, ANN001, ANN202 - constants of a compiled kernel are in capitals, its arguments have no types

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_rows(p, parts, tiles, rows, BM: tl.constexpr):
    """How many rows program p of `parts` has, where it takes each `parts`-th tile of BM rows."""
    count = (tiles - p + parts - 1) // parts * BM
    return count - tl.where((tiles - 1) % parts == p, tiles * BM - rows, 0)


@triton.jit
def _dot_rows(acc, x, w, rows, inside, cols, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc + x[rows] w[cols]^T."""
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        at = x + rows[:, None] * K + ks[None, :]
        a = tl.load(at) if EVEN else tl.load(at, mask=inside[:, None], other=0.0)
        b = tl.load(w + cols[None, :] * K + ks[:, None])
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _dot_columns(acc, d, w, rows, inside, cols, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc + d[rows] w[:, cols]."""
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        at = d + rows[:, None] * K + ks[None, :]
        a = tl.load(at) if EVEN else tl.load(at, mask=inside[:, None], other=0.0)
        b = tl.load(w + ks[:, None] * N + cols[None, :])
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def product_moments_kernel(
    x, w, y, parts, rows, tiles, P, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    NB: tl.constexpr = N // BN
    cols = pid % NB * BN + tl.arange(0, BN)
    p = pid // NB % P
    group = pid // (NB * P)
    pivot = tl.zeros([BN], tl.float32)
    s = tl.zeros([BN], tl.float32)
    q = tl.zeros([BN], tl.float32)
    for t in range(p, tiles, P):
        local = t * BM + tl.arange(0, BM)
        inside = local < rows
        at = group.to(tl.int64) * rows + local
        acc = _dot_rows(tl.zeros([BM, BN], tl.float32), x, w, at, inside, cols, K, BK, EVEN)
        o = acc.to(y.dtype.element_ty)
        f = o.to(tl.float32)
        if EVEN:
            tl.store(y + at[:, None] * N + cols[None, :], o)
        else:
            tl.store(y + at[:, None] * N + cols[None, :], o, mask=inside[:, None])
            f = tl.where(inside[:, None], f, 0.0)
        if t == p:
            pivot = tl.sum(f, 0) / tl.minimum(BM, rows - t * BM)
        f = f - pivot[None, :]
        if not EVEN:
            f = tl.where(inside[:, None], f, 0.0)
        s += tl.sum(f, 0)
        q += tl.sum(f * f, 0)
    part = parts + (group * P + p) * 3 * N + cols
    tl.store(part, pivot)
    tl.store(part + N, s)
    tl.store(part + 2 * N, q)


@triton.jit
def combine_moments_kernel(
    parts, mean, var, rows, tiles, P, N: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The mean, and the variance around it where `var` is wanted, of parts that are (pivot, sum, sum of squares)."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BP, BN], tl.float64)
    for i in range(0, P, BP):
        p = i + tl.arange(0, BP)
        there = (p < P)[:, None]
        at = parts + (group * P + p)[:, None] * 3 * N + cols[None, :]
        n = part_rows(p, P, tiles, rows, BM).to(tl.float64)[:, None]
        pivot = tl.load(at, mask=there, other=0.0).to(tl.float64)
        total += tl.where(there, pivot * n + tl.load(at + N, mask=there, other=0.0), 0.0)
    m = tl.sum(total, 0) / rows
    total = tl.zeros([BP, BN], tl.float64)
    for i in range(0, P, BP):
        p = i + tl.arange(0, BP)
        there = (p < P)[:, None]
        at = parts + (group * P + p)[:, None] * 3 * N + cols[None, :]
        n = part_rows(p, P, tiles, rows, BM).to(tl.float64)[:, None]
        d = tl.load(at, mask=there, other=0.0).to(tl.float64) - m[None, :]
        s = tl.load(at + N, mask=there, other=0.0).to(tl.float64)
        q = tl.load(at + 2 * N, mask=there, other=0.0).to(tl.float64)
        total += tl.where(there, q + 2.0 * d * s + n * d * d, 0.0)
    tl.store(mean + group * N + cols, m.to(tl.float32))
    tl.store(var + group * N + cols, tl.maximum(tl.sum(total, 0) / rows, 0.0).to(tl.float32))


@triton.jit
def scatter_kernel(
    x, y, scale, shift, parts, matrices, rows, tiles, P, C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    APPLY: tl.constexpr,
):  # fmt: skip
    """Around the program's pivots, the sums of rows and of their products, for one pair of column blocks; with APPLY
    the rows are relu(x scale + shift), and C is BC."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = C // BC
    pair = pid % (BLOCKS * BLOCKS)
    i = pair // BLOCKS
    j = pair % BLOCKS
    if j > i:  # the matrix is symmetric
        return
    p = pid // (BLOCKS * BLOCKS) % P
    group = pid // (BLOCKS * BLOCKS * P)
    ci = i * BC + tl.arange(0, BC)
    cj = j * BC + tl.arange(0, BC)
    pi = tl.zeros([BC], tl.float32)
    pj = tl.zeros([BC], tl.float32)
    s = tl.zeros([BC], tl.float32)
    acc = tl.zeros([BC, BC], tl.float32)
    if APPLY:
        a = tl.load(scale + group * C + ci)
        b = tl.load(shift + group * C + ci)
    for t in range(p, tiles, P):
        local = t * BM + tl.arange(0, BM)
        inside = local < rows
        at = group.to(tl.int64) * rows + local
        whole = tl.minimum(BM, rows - t * BM)
        v = tl.load(x + at[:, None] * C + ci[None, :], mask=inside[:, None], other=0.0)
        f = v.to(tl.float32)
        if APPLY:
            v = tl.maximum(f * a[None, :] + b[None, :], 0.0).to(y.dtype.element_ty)
            tl.store(y + at[:, None] * C + ci[None, :], v, mask=inside[:, None])
            f = tl.where(inside[:, None], v.to(tl.float32), 0.0)
        if t == p:
            pi = (tl.sum(f, 0) / whole).to(v.dtype).to(tl.float32)
        f = tl.where(inside[:, None], f - pi[None, :], 0.0)
        vi = f.to(v.dtype)
        s += tl.sum(vi.to(tl.float32), 0)
        if BLOCKS == 1:
            acc = tl.dot(tl.trans(vi), vi, acc)
        else:
            g = tl.load(x + at[:, None] * C + cj[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            if t == p:
                pj = (tl.sum(g, 0) / whole).to(v.dtype).to(tl.float32)
            vj = tl.where(inside[:, None], g - pj[None, :], 0.0).to(v.dtype)
            acc = tl.dot(tl.trans(vi), vj, acc)
    to = matrices + ((group * P + p) * BLOCKS * BLOCKS + pair).to(tl.int64) * BC * BC
    tl.store(to + tl.arange(0, BC)[:, None] * BC + tl.arange(0, BC)[None, :], acc)
    if i == j:
        part = parts + (group * P + p) * 3 * C + ci
        tl.store(part, pi)
        tl.store(part + C, s)
        tl.store(part + 2 * C, s)


@triton.jit
def combine_scatter_kernel(
    parts, matrices, mean, out, rows, tiles, P, C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The scatter matrix around the mean, by the parts around their own pivots."""
    BLOCKS: tl.constexpr = C // BC
    pair = tl.program_id(1)
    group = tl.program_id(2)
    i = pair // BLOCKS
    j = pair % BLOCKS
    if j > i:
        return
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    ci = i * BC + e // BC
    cj = j * BC + e % BC
    mi = tl.load(mean + group * C + ci).to(tl.float64)
    mj = tl.load(mean + group * C + cj).to(tl.float64)
    total = tl.zeros([BP, BE], tl.float64)
    for k in range(0, P, BP):
        p = k + tl.arange(0, BP)
        there = (p < P)[:, None]
        row = (group * P + p)[:, None]
        g = tl.load(matrices + (row.to(tl.int64) * BLOCKS * BLOCKS + pair) * BC * BC + e[None, :], mask=there, other=0.0)
        n = part_rows(p, P, tiles, rows, BM).to(tl.float64)[:, None]
        at = parts + row * 3 * C
        di = tl.load(at + ci[None, :], mask=there, other=0.0).to(tl.float64) - mi[None, :]
        dj = tl.load(at + cj[None, :], mask=there, other=0.0).to(tl.float64) - mj[None, :]
        si = tl.load(at + C + ci[None, :], mask=there, other=0.0).to(tl.float64)
        sj = tl.load(at + C + cj[None, :], mask=there, other=0.0).to(tl.float64)
        total += tl.where(there, g.to(tl.float64) + si * dj + sj * di + n * di * dj, 0.0)
    o = tl.sum(total, 0).to(tl.float32)
    tl.store(out + (group * C + ci) * C + cj, o)
    tl.store(out + (group * C + cj) * C + ci, o)


@triton.jit
def product_norm_kernel(
    a, w, scale, shift, x, v, y, rows, tiles, N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """relu((a w^T) scale + shift + x), or with K2 columns in x, x v^T in its place."""
    pid = tl.program_id(0)
    NB: tl.constexpr = N // BN
    cols = pid % NB * BN + tl.arange(0, BN)
    t = pid // NB % tiles
    group = pid // (NB * tiles)
    local = t * BM + tl.arange(0, BM)
    inside = local < rows
    at = group.to(tl.int64) * rows + local
    acc = _dot_rows(tl.zeros([BM, BN], tl.float32), a, w, at, inside, cols, K, BK, EVEN)
    acc = acc * tl.load(scale + group * N + cols)[None, :] + tl.load(shift + group * N + cols)[None, :]
    off = at[:, None] * N + cols[None, :]
    if K2 > 0:
        acc = _dot_rows(acc, x, v + group * N * K2, at, inside, cols, K2, BK, EVEN)
    else:
        acc += tl.load(x + off, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(y + off, tl.maximum(acc, 0.0).to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def weight_product_kernel(
    d, a, parts, rows, tiles, P, N: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """d^T a over each P-th tile of rows."""
    pid = tl.program_id(0)
    CB: tl.constexpr = C // BC
    BLOCKS: tl.constexpr = N // BN * CB
    n = pid % BLOCKS // CB * BN + tl.arange(0, BN)
    c = pid % CB * BC + tl.arange(0, BC)
    p = pid // BLOCKS % P
    group = pid // (BLOCKS * P)
    acc = tl.zeros([BN, BC], tl.float32)
    for t in range(p, tiles, P):
        local = t * BM + tl.arange(0, BM)
        at = group.to(tl.int64) * rows + local
        if EVEN:
            left = tl.load(d + at[None, :] * N + n[:, None])
            right = tl.load(a + at[:, None] * C + c[None, :])
        else:
            inside = local < rows
            left = tl.load(d + at[None, :] * N + n[:, None], mask=inside[None, :], other=0.0)
            right = tl.load(a + at[:, None] * C + c[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(parts + (group * P + p).to(tl.int64) * N * C + n[:, None] * C + c[None, :], acc)


@triton.jit
def sum_parts_kernel(parts, out, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """The sum over the P parts of N numbers of each group."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BP, BN], tl.float64)
    for i in range(0, P, BP):
        p = i + tl.arange(0, BP)
        at = parts + (group * P + p).to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(at, mask=(p < P)[:, None] & (cols < N)[None, :], other=0.0)
    tl.store(out + group.to(tl.int64) * N + cols, tl.sum(total, 0).to(tl.float32), mask=cols < N)


@triton.jit
def input_gradient_kernel(
    d, w, a, qm, c, x, z, parts, rows, tiles, P, N: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z = d w + a qm + c; MASKED: where a > 0, with the sums of z and z x over the program's rows."""
    pid = tl.program_id(0)
    NB: tl.constexpr = N // BN
    cols = pid % NB * BN + tl.arange(0, BN)
    p = pid // NB % P
    group = pid // (NB * P)
    constant = tl.load(c + group * N + cols)
    s = tl.zeros([BN], tl.float32)
    q = tl.zeros([BN], tl.float32)
    for t in range(p, tiles, P):
        local = t * BM + tl.arange(0, BM)
        inside = local < rows
        at = group.to(tl.int64) * rows + local
        acc = tl.zeros([BM, BN], tl.float32)
        acc = _dot_columns(acc, d, w + group * K * N, at, inside, cols, K, N, BK, EVEN)
        acc = _dot_columns(acc, a, qm + group * N * N, at, inside, cols, N, N, BK, EVEN)
        acc += constant[None, :]
        off = at[:, None] * N + cols[None, :]
        if MASKED:
            positive = tl.load(a + off, mask=inside[:, None], other=0.0) > 0
            o = tl.where(positive, acc, 0.0).to(z.dtype.element_ty)
            f = o.to(tl.float32)
            s += tl.sum(f, 0)
            q += tl.sum(f * tl.load(x + off, mask=inside[:, None], other=0.0).to(tl.float32), 0)
        else:
            o = acc.to(z.dtype.element_ty)
        tl.store(z + off, o, mask=inside[:, None])
    if MASKED:
        part = parts + (group * P + p) * 2 * N + cols
        tl.store(part, s)
        tl.store(part + N, q)


@triton.jit
def input_gradient_added_kernel(
    d, w, added, x, z, parts, rows, tiles, P, side, N: tl.constexpr, K: tl.constexpr, STRIDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z = d w + added where x > 0, with the sums of z over the program's rows."""
    pid = tl.program_id(0)
    NB: tl.constexpr = N // BN
    cols = pid % NB * BN + tl.arange(0, BN)
    p = pid // NB % P
    group = pid // (NB * P)
    s = tl.zeros([BN], tl.float32)
    for t in range(p, tiles, P):
        local = t * BM + tl.arange(0, BM)
        inside = local < rows
        at = group.to(tl.int64) * rows + local
        off = at[:, None] * N + cols[None, :]
        acc = _dot_columns(tl.zeros([BM, BN], tl.float32), d, w, at, inside, cols, K, N, BK, EVEN)
        if STRIDED:
            half = (side + 1) // 2
            row = at // side % side
            column = at % side
            there = (row % 2 == 0) & (column % 2 == 0) & inside
            source = (at // (side * side) * half + row // 2) * half + column // 2
            more = tl.load(added + source[:, None] * N + cols[None, :], mask=there[:, None], other=0.0)
        else:
            more = tl.load(added + off, mask=inside[:, None], other=0.0)
        acc += more.to(tl.float32)
        positive = tl.load(x + off, mask=inside[:, None], other=0.0) > 0
        o = tl.where(positive, acc, 0.0).to(z.dtype.element_ty)
        tl.store(z + off, o, mask=inside[:, None])
        s += tl.sum(o.to(tl.float32), 0)
    tl.store(parts + (group * P + p) * N + cols, s)
