"""Triton programs for the products of a bottleneck and the norms around them; gram_triton.py launches them.

All sums are deterministic: each program leaves its own part, and a second one adds the parts up in float64. Sums of
squares are taken around a pivot, the mean of the program's first tile, so that they lose nothing where a channel's mean
is large, and tensor cores, which truncate, add up small numbers only.

Where a tile has all K inner columns (K == BK), the weights stay in shared memory while tiles of rows stream by. Sums
are then kept for each number of a tile, and added up over its rows once in the end, if there are registers for that.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from paceline.model.kernels.rows_programs import write_moments


@triton.jit
def part_rows(p, parts, tiles, rows, BM: tl.constexpr):
    """How many rows program p of `parts` has, where it takes each `parts`-th tile of BM rows."""
    count = (tiles - p + parts - 1) // parts * BM
    return count - tl.where((tiles - 1) % parts == p, tiles * BM - rows, 0)


@triton.jit
def tile_rows(x, group, t, rows, width: tl.constexpr, BM: tl.constexpr):
    """Where tile t of a group's rows begins: offsets inside a tile then fit 32 bits."""
    return x + (group.to(tl.int64) * rows + t * BM) * width


@triton.jit
def _share(P, N: tl.constexpr, BN: tl.constexpr):
    """A program's BN columns of N, its number among the P that share a group's rows, and the group."""
    BLOCKS: tl.constexpr = N // BN
    pid = tl.program_id(0)
    return pid % BLOCKS * BN + tl.arange(0, BN), pid // BLOCKS % P, pid // (BLOCKS * P)


@triton.jit
def _tile(x, group, t, rows, cols, N: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr):
    """Some columns of tile t of a group's rows; zeros where there are no rows."""
    r = tl.arange(0, BM)
    at = tile_rows(x, group, t, rows, N, BM) + r[:, None] * N + cols[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(r < rows - t * BM)[:, None], other=0.0)


@triton.jit
def _added_tile(
    added, group, t, rows, cols, side, N: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr, STRIDED: tl.constexpr
):
    """The same; STRIDED: of pictures of that side, of which every other pixel of every other line is there."""
    if not STRIDED:
        return _tile(added, group, t, rows, cols, N, BM, EVEN)
    half = (side + 1) // 2
    at = group * rows + t * BM + tl.arange(0, BM)
    row = at // side % side
    column = at % side
    there = (row % 2 == 0) & (column % 2 == 0) & (tl.arange(0, BM) < rows - t * BM)
    source = ((at // (side * side) * half + row // 2) * half + column // 2).to(tl.int64)
    return tl.load(added + source[:, None] * N + cols[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _store_tile(y, values, group, t, rows, cols, N: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr):
    """Write some columns of tile t of a group's rows."""
    r = tl.arange(0, BM)
    at = tile_rows(y, group, t, rows, N, BM) + r[:, None] * N + cols[None, :]
    if EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(r < rows - t * BM)[:, None])


@triton.jit
def _dot_rows(acc, x, w, inside, cols, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc + x w[cols]^T, x being where a tile of rows begins."""
    r = tl.arange(0, BM)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        at = x + r[:, None] * K + ks[None, :]
        a = tl.load(at) if EVEN else tl.load(at, mask=inside[:, None], other=0.0)
        b = tl.load(w + cols[None, :] * K + ks[:, None])
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _dot_columns(
    acc, d, w, inside, cols, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):
    """acc + d w[:, cols], d being where a tile of rows begins."""
    r = tl.arange(0, BM)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        at = d + r[:, None] * K + ks[None, :]
        a = tl.load(at) if EVEN else tl.load(at, mask=inside[:, None], other=0.0)
        b = tl.load(w + ks[:, None] * N + cols[None, :])
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def product_moments_program(
    x, w, y, parts, rows, tiles, P, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y = x w^T, with pivot, sum and sum of squares of its columns over the program\'s rows."""
    cols, p, group = _share(P, N, BN)
    if K == BK:
        k = tl.arange(0, K)
        weights = tl.load(w + cols[None, :] * K + k[:, None])
    pivot = tl.zeros([BN], tl.float32)
    s = tl.zeros([BM, BN] if K == BK else [BN], tl.float32)
    q = tl.zeros([BM, BN] if K == BK else [BN], tl.float32)
    for t in range(p, tiles, P):
        inside = tl.arange(0, BM) < rows - t * BM
        if K == BK:
            acc = tl.dot(_tile(x, group, t, rows, k, K, BM, EVEN), weights)
        else:
            acc = tl.zeros([BM, BN], tl.float32)
            acc = _dot_rows(acc, tile_rows(x, group, t, rows, K, BM), w, inside, cols, K, BM, BK, EVEN)
        o = acc.to(y.dtype.element_ty)
        _store_tile(y, o, group, t, rows, cols, N, BM, EVEN)
        f = o.to(tl.float32)
        if t == p:
            pivot = tl.sum(f, 0) / tl.minimum(BM, rows - t * BM)
        f = f - pivot[None, :]
        if not EVEN:
            f = tl.where(inside[:, None], f, 0.0)
        s += f if K == BK else tl.sum(f, 0)
        q += f * f if K == BK else tl.sum(f * f, 0)
    part = parts + (group * P + p) * 3 * N + cols
    tl.store(part, pivot)
    tl.store(part + N, tl.sum(s, 0) if K == BK else s)
    tl.store(part + 2 * N, tl.sum(q, 0) if K == BK else q)


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def combine_moments_program(
    parts, mean, var, weight, bias, inverse, scale, means, variances, rows, tiles, P, stride, epsilon,
    N: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The mean, and the variance around it, of parts that are (pivot, sum, sum of squares), and what a norm makes of
    them."""
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
    v = tl.maximum(tl.sum(total, 0) / rows, 0.0)
    write_moments(
        m, v, mean, var, weight, bias, inverse, scale, means, variances, group, cols, N, stride, epsilon, rows, NORMED
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def scatter_program(
    x, y, scale, shift, parts, matrices, rows, tiles, P,
    C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, APPLY: tl.constexpr,
):  # fmt: skip
    """Around the program's pivots, the sums of rows and of their products; with APPLY of relu(x scale + shift).

    CP is the number of channels, or the power of two above it.
    """
    pid = tl.program_id(0)
    p = pid % P
    group = pid // P
    c = tl.arange(0, CP)
    own = c < C
    pivot = tl.zeros([CP], tl.float32)
    s = tl.zeros([CP], tl.float32)
    acc = tl.zeros([CP, CP], tl.float32)
    if APPLY:
        a = tl.load(scale + group * C + c, mask=own, other=0.0)
        b = tl.load(shift + group * C + c, mask=own, other=0.0)
    for t in range(p, tiles, P):
        inside = (tl.arange(0, BM) < rows - t * BM)[:, None]
        if C < CP:
            inside = inside & own[None, :]
        off = tl.arange(0, BM)[:, None] * C + c[None, :]
        v = tl.load(tile_rows(x, group, t, rows, C, BM) + off, mask=inside, other=0.0)
        f = v.to(tl.float32)
        if APPLY:
            v = tl.maximum(f * a[None, :] + b[None, :], 0.0).to(y.dtype.element_ty)
            tl.store(tile_rows(y, group, t, rows, C, BM) + off, v, mask=inside)
            f = tl.where(inside, v.to(tl.float32), 0.0)
        if t == p:
            pivot = (tl.sum(f, 0) / tl.minimum(BM, rows - t * BM)).to(v.dtype).to(tl.float32)
        around = tl.where(inside, f - pivot[None, :], 0.0).to(v.dtype)
        s += tl.sum(around.to(tl.float32), 0)
        acc = tl.dot(tl.trans(around), around, acc)
    at = matrices + (group * P + p).to(tl.int64) * C * C + c[:, None] * C + c[None, :]
    tl.store(at, acc, mask=own[:, None] & own[None, :])
    part = parts + (group * P + p) * 3 * C + c
    tl.store(part, pivot, mask=own)
    tl.store(part + C, s, mask=own)
    tl.store(part + 2 * C, s, mask=own)


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def combine_scatter_program(
    parts, matrices, mean, out, rows, tiles, P, C: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr
):
    """The scatter matrix around the mean, by the parts around their own pivots."""
    group = tl.program_id(1)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    i = e // C
    j = e % C
    mi = tl.load(mean + group * C + i).to(tl.float64)
    mj = tl.load(mean + group * C + j).to(tl.float64)
    total = tl.zeros([BP, BE], tl.float64)
    for k in range(0, P, BP):
        p = k + tl.arange(0, BP)
        there = (p < P)[:, None]
        row = (group * P + p)[:, None]
        g = tl.load(matrices + row.to(tl.int64) * C * C + e[None, :], mask=there, other=0.0).to(tl.float64)
        n = part_rows(p, P, tiles, rows, BM).to(tl.float64)[:, None]
        at = parts + row * 3 * C
        di = tl.load(at + i[None, :], mask=there, other=0.0).to(tl.float64) - mi[None, :]
        dj = tl.load(at + j[None, :], mask=there, other=0.0).to(tl.float64) - mj[None, :]
        si = tl.load(at + C + i[None, :], mask=there, other=0.0).to(tl.float64)
        sj = tl.load(at + C + j[None, :], mask=there, other=0.0).to(tl.float64)
        total += tl.where(there, g + si * dj + sj * di + n * di * dj, 0.0)
    tl.store(out + group * C * C + e, tl.sum(total, 0).to(tl.float32))


@triton.jit(do_not_specialize=["rows", "tiles"])
def product_norm_program(
    a, w, scale, shift, x, v, y, rows, tiles, N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """relu((a w^T) scale + shift + x), or with K2 columns in x, x v^T in its place."""
    cols, t, group = _share(tiles, N, BN)
    inside = tl.arange(0, BM) < rows - t * BM
    off = tl.arange(0, BM)[:, None] * N + cols[None, :]
    if K2 == 0:  # under way while the product is computed
        beside = tl.load(tile_rows(x, group, t, rows, N, BM) + off, mask=inside[:, None], other=0.0)
    acc = tl.zeros([BM, BN], tl.float32)
    acc = _dot_rows(acc, tile_rows(a, group, t, rows, K, BM), w, inside, cols, K, BM, BK, EVEN)
    acc = acc * tl.load(scale + group * N + cols)[None, :] + tl.load(shift + group * N + cols)[None, :]
    if K2 > 0:
        x = tile_rows(x, group, t, rows, K2, BM)
        acc = _dot_rows(acc, x, v + group * N * K2, inside, cols, K2, BM, BK, EVEN)
    else:
        acc += beside.to(tl.float32)
    to = tile_rows(y, group, t, rows, N, BM) + off
    tl.store(to, tl.maximum(acc, 0.0).to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def product_norm_streaming_program(
    a, w, scale, shift, x, y, rows, tiles, P, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """relu((a w^T) scale + shift + x), with all K inner columns in a tile."""
    cols, p, group = _share(P, N, BN)
    k = tl.arange(0, K)
    weights = tl.load(w + cols[None, :] * K + k[:, None])
    factor = tl.load(scale + group * N + cols)[None, :]
    term = tl.load(shift + group * N + cols)[None, :]
    beside = _tile(x, group, p, rows, cols, N, BM, EVEN)
    for t in range(p, tiles, P):
        ahead = _tile(x, group, tl.minimum(t + P, tiles - 1), rows, cols, N, BM, EVEN)  # under way meanwhile
        acc = tl.dot(_tile(a, group, t, rows, k, K, BM, EVEN), weights) * factor + term + beside.to(tl.float32)
        _store_tile(y, tl.maximum(acc, 0.0).to(y.dtype.element_ty), group, t, rows, cols, N, BM, EVEN)
        beside = ahead


@triton.jit(do_not_specialize=["P", "N"])
def sum_parts_program(parts, out, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """The sum over the P parts of N numbers of each group."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BP, BN], tl.float64)
    for i in range(0, P, BP):
        p = i + tl.arange(0, BP)
        at = parts + (group * P + p).to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(at, mask=(p < P)[:, None] & (cols < N)[None, :], other=0.0)
    tl.store(out + group.to(tl.int64) * N + cols, tl.sum(total, 0).to(tl.float32), mask=cols < N)


@triton.jit(do_not_specialize=["rows", "tiles", "P"])
def input_gradient_program(
    d, w, a, qm, c, x, z, parts, rows, tiles, P, N: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z = d w + a qm + c; MASKED: where a > 0, with the sums of z and z x over the program's rows."""
    cols, p, group = _share(P, N, BN)
    constant = tl.load(c + group * N + cols)
    WHOLE: tl.constexpr = MASKED and K == BK
    if WHOLE:  # and N is a power of two
        k = tl.arange(0, K)
        n = tl.arange(0, N)
        weights = tl.load(w + (group * K + k[:, None]) * N + cols[None, :])
        own_weights = tl.load(qm + (group * N + n[:, None]) * N + cols[None, :])
    s = tl.zeros([BM, BN] if WHOLE else [BN], tl.float32)
    q = tl.zeros([BM, BN] if WHOLE else [BN], tl.float32)
    for t in range(p, tiles, P):
        inside = tl.arange(0, BM) < rows - t * BM
        if WHOLE:
            positive = _tile(a, group, t, rows, cols, N, BM, EVEN) > 0
            before = _tile(x, group, t, rows, cols, N, BM, EVEN)
            acc = tl.dot(_tile(d, group, t, rows, k, K, BM, EVEN), weights)
            acc = tl.dot(_tile(a, group, t, rows, n, N, BM, EVEN), own_weights, acc)
        else:
            acc = tl.zeros([BM, BN], tl.float32)
            d_tile = tile_rows(d, group, t, rows, K, BM)
            acc = _dot_columns(acc, d_tile, w + group * K * N, inside, cols, K, N, BM, BK, EVEN)
            a_tile = tile_rows(a, group, t, rows, N, BM)
            acc = _dot_columns(acc, a_tile, qm + group * N * N, inside, cols, N, N, BM, BK, EVEN)
        acc += constant[None, :]
        if MASKED:
            if not WHOLE:
                positive = _tile(a, group, t, rows, cols, N, BM, EVEN) > 0
            o = tl.where(positive, acc, 0.0).to(z.dtype.element_ty)
            f = o.to(tl.float32)
            s += f if WHOLE else tl.sum(f, 0)
            if not WHOLE:
                before = _tile(x, group, t, rows, cols, N, BM, EVEN)
            f = f * before.to(tl.float32)
            q += f if WHOLE else tl.sum(f, 0)
        else:
            o = acc.to(z.dtype.element_ty)
        _store_tile(z, o, group, t, rows, cols, N, BM, EVEN)
    if MASKED:
        part = parts + (group * P + p) * 2 * N + cols
        tl.store(part, tl.sum(s, 0) if WHOLE else s)
        tl.store(part + N, tl.sum(q, 0) if WHOLE else q)


@triton.jit(do_not_specialize=["rows", "tiles", "P", "side"])
def input_gradient_added_program(
    d, w, added, x, z, parts, rows, tiles, P, side, N: tl.constexpr, K: tl.constexpr, STRIDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z = d w + added where x > 0, with the sums of z over the program's rows."""
    cols, p, group = _share(P, N, BN)
    LATE: tl.constexpr = K == BK and K <= 128
    s = tl.zeros([BM, BN] if LATE else [BN], tl.float32)
    if K == BK:
        k = tl.arange(0, K)
        weights = tl.load(w + k[:, None] * N + cols[None, :])
        before = _tile(x, group, p, rows, cols, N, BM, EVEN)
        more = _added_tile(added, group, p, rows, cols, side, N, BM, EVEN, STRIDED)
    for t in range(p, tiles, P):
        # What is loaded first is under way while the product is computed: the next tile's, or this one's.
        if K == BK:
            ahead = tl.minimum(t + P, tiles - 1)
            before_ahead = _tile(x, group, ahead, rows, cols, N, BM, EVEN)
            more_ahead = _added_tile(added, group, ahead, rows, cols, side, N, BM, EVEN, STRIDED)
            acc = tl.dot(_tile(d, group, t, rows, k, K, BM, EVEN), weights)
        else:
            inside = tl.arange(0, BM) < rows - t * BM
            before = _tile(x, group, t, rows, cols, N, BM, EVEN)
            more = _added_tile(added, group, t, rows, cols, side, N, BM, EVEN, STRIDED)
            acc = tl.zeros([BM, BN], tl.float32)
            acc = _dot_columns(acc, tile_rows(d, group, t, rows, K, BM), w, inside, cols, K, N, BM, BK, EVEN)
        o = tl.where(before > 0, acc + more.to(tl.float32), 0.0).to(z.dtype.element_ty)
        _store_tile(z, o, group, t, rows, cols, N, BM, EVEN)
        s += o.to(tl.float32) if LATE else tl.sum(o.to(tl.float32), 0)
        if K == BK:
            before = before_ahead
            more = more_ahead
    tl.store(parts + (group * P + p) * N + cols, tl.sum(s, 0) if LATE else s)
