"""The Triton programs behind `rows_triton`: each works on a tile of rows and columns of one norm group.

A column is a channel; or rows that lie side by side are folded into one, and a column is a channel of one of them.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)), in half the instructions of exp and a division, which look after the tiniest numbers."""
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """An activation of z."""
    # Comparisons are turned so that NaN passes through.
    if ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    elif ACTIVATION == "relu6":
        z = tl.where(z < 0.0, 0.0, tl.where(z > 6.0, 6.0, z))
    elif ACTIVATION == "silu":
        z = z * sigmoid(z)
    elif ACTIVATION == "hardswish":
        z = z * tl.where(z < -3.0, 0.0, tl.where(z > 3.0, 1.0, z * (1.0 / 6.0) + 0.5))
    return z


@triton.jit
def behind(d, z, ACTIVATION: tl.constexpr):
    """The gradient before an activation of z; for ReLU and ReLU6, its output will do as well."""
    if ACTIVATION == "relu":
        d = tl.where(z > 0.0, d, 0.0)
    elif ACTIVATION == "relu6":
        d = tl.where((z > 0.0) & (z < 6.0), d, 0.0)
    elif ACTIVATION == "silu":
        s = sigmoid(z)
        d = d * s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "hardswish":
        d = d * tl.where(z < -3.0, 0.0, tl.where(z > 3.0, 1.0, z * (1.0 / 3.0) + 0.5))
    return d


@triton.jit
def _load(at, seen, EVEN: tl.constexpr):
    """Data in float32; zeros where a ragged tile sticks out."""
    values = tl.load(at) if EVEN else tl.load(at, mask=seen, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _channel(values, group, column, inside, channels, FOLDED: tl.constexpr):
    """What belongs to the channels of these columns, as a row.

    FOLDED is 0, or the power of two that divides the number of channels: so many are loaded together.
    """
    if FOLDED > 0:
        index = tl.max_contiguous(tl.multiple_of(group * channels + column % channels, FOLDED), FOLDED)
    else:
        index = group * channels + column
    return tl.load(values + index, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _factor(mask, group, row, rows, images, MASKED: tl.constexpr):
    """The factors of the images of these rows, as a column; no mask is a factor of 1."""
    if MASKED:
        image = tl.minimum(row // (rows // images), images - 1)
        factor = tl.load(mask + group * images + image).to(tl.float32)[:, None]
    else:
        factor = 1.0
    return factor


@triton.jit
def _write_sums(partials, first, second, group, chunk, column, inside, width, LANES: tl.constexpr, BC: tl.constexpr):
    """Keep a chunk's two sums of each column; where all columns are here, those of one channel become one."""
    if LANES > 1:
        first = tl.sum(tl.reshape(first, [LANES, BC // LANES]), 0)
        second = tl.sum(tl.reshape(second, [LANES, BC // LANES]), 0)
        column = tl.arange(0, BC // LANES)
        inside = column < BC // LANES
    width = width // LANES
    chunks = tl.num_programs(0) // tl.cdiv(width * LANES, BC)
    at = partials + (group * chunks + chunk) * width + column
    tl.store(at, first, mask=inside)
    tl.store(at + tl.num_programs(1) * chunks * width, second, mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk_rows"])
def moments_of_chunks(
    x, partials, rows, width, chunk_rows,
    EVEN: tl.constexpr, LANES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The sums of x and of x * x over a chunk of rows, for a tile of columns."""
    tiles = tl.cdiv(width, BC)
    group, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    inside = column < width
    start = chunk * chunk_rows
    count = tl.minimum(chunk_rows, rows - start)
    pivot = tl.load(x + (group * rows + start) * width + column, mask=inside, other=0.0).to(tl.float32)
    within = tl.arange(0, BR)[:, None] * width + column[None, :]
    s = tl.zeros([BR, BC], tl.float32)
    q = tl.zeros([BR, BC], tl.float32)
    for first in range(0, count, BR * UNROLL):
        for step in tl.static_range(UNROLL):
            done = first + step * BR
            seen = (done + tl.arange(0, BR) < count)[:, None] & inside[None, :]
            v = _load(x + (group * rows + start + done) * width + within, seen, EVEN) - pivot[None, :]
            if not EVEN:
                v = tl.where(seen, v, 0.0)
            s += v
            q += v * v
    # From here on in float64, which has digits enough for squares of means.
    total, squares, pivot = tl.sum(s, 0).to(tl.float64), tl.sum(q, 0).to(tl.float64), pivot.to(tl.float64)
    shift = pivot * count.to(tl.float64)
    _write_sums(
        partials, total + shift, squares + pivot * (2.0 * total + shift),
        group, chunk, column, inside, width, LANES, BC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "chunk_rows", "images"])
def gradients_of_chunks(
    dy, x, beside, dz, scale, shift, mask, partials, rows, width, channels, chunk_rows, images,
    ACTIVATION: tl.constexpr, BESIDE: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr,
    FOLDED: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums of mask * dz and mask * dz * x over a chunk of rows, for a tile of columns."""
    tiles = tl.cdiv(width, BC)
    group, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    inside = column < width
    start = chunk * chunk_rows
    count = tl.minimum(chunk_rows, rows - start)
    pivot = tl.load(x + (group * rows + start) * width + column, mask=inside, other=0.0).to(tl.float32)
    within = tl.arange(0, BR)[:, None] * width + column[None, :]
    if ACTIVATION is not None and BESIDE != "out":
        factor = _channel(scale, group, column, inside, channels, FOLDED)
        term = _channel(shift, group, column, inside, channels, FOLDED)
    s = tl.zeros([BR, BC], tl.float32)
    q = tl.zeros([BR, BC], tl.float32)
    for first in range(0, count, BR):
        row = first + tl.arange(0, BR)
        seen = (row < count)[:, None] & inside[None, :]
        base = (group * rows + start + first) * width
        d, v = _load(dy + base + within, seen, EVEN), _load(x + base + within, seen, EVEN)
        m = _factor(mask, group, start + row, rows, images, MASKED)
        if ACTIVATION is not None:
            if BESIDE == "out":
                z = _load(beside + base + within, seen, EVEN)
            else:
                z = (v * factor + term) * m
                if BESIDE == "shortcut":
                    z += _load(beside + base + within, seen, EVEN)
            d = behind(d, z, ACTIVATION)
            if WRITE:
                short = d.to(dz.dtype.element_ty)
                tl.store(dz + base + within, short, mask=None if EVEN else seen)
                d = short.to(tl.float32)  # what comes after reads dz as it is stored
        d = d * m
        s += d
        q += d * (v - pivot[None, :])  # zero where the tile sticks out, because d is
    total, products = tl.sum(s, 0).to(tl.float64), tl.sum(q, 0).to(tl.float64)
    _write_sums(
        partials, total, products + pivot.to(tl.float64) * total,
        group, chunk, column, inside, width, LANES, BC,
    )  # fmt: skip


@triton.jit
def write_constants(
    mu, v, weight, bias, inverse, scale, means, variances, group, column, inside, channels, stride, epsilon, count,
    replicas,
):  # fmt: skip
    """What a norm scales and shifts a group's channels by; its mean and unbiased variance go to their slots."""
    at = group * channels + column
    slot = group.to(tl.int64) * stride + column
    tl.store(means + slot, mu / replicas, mask=inside)
    tl.store(variances + slot, v * count / tl.maximum(count - 1, 1) / replicas, mask=inside)
    inv = 1.0 / tl.sqrt(v + epsilon)
    factor = tl.load(weight + column, mask=inside).to(tl.float64) * inv
    tl.store(inverse + at, inv, mask=inside)
    tl.store(scale + at, factor, mask=inside)
    shift = scale + tl.num_programs(1) * channels
    tl.store(shift + at, tl.load(bias + column, mask=inside).to(tl.float64) - mu * factor, mask=inside)


@triton.jit
def write_moments(
    m, v, mean, var, weight, bias, inverse, scale, means, variances, group, column, channels, stride, epsilon, count,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Keep a mean and a variance in float32, and what a norm makes of them as they are kept."""
    m = m.to(tl.float32)
    v = v.to(tl.float32)
    tl.store(mean + group * channels + column, m)
    tl.store(var + group * channels + column, v)
    if NORMED:
        write_constants(
            m.to(tl.float64), v.to(tl.float64), weight, bias, inverse, scale, means, variances, group, column,
            column < channels, channels, stride, epsilon, count, 1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "count"])
def sums_of_chunks(
    partials, totals, weight, bias, inverse, scale, means, variances, chunks, channels, count, stride, epsilon,
    MOMENTS: tl.constexpr, NORMED: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The two sums of all chunks; of sums of x and x * x, the mean and the variance, and what a norm makes of them."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < channels
    first = tl.zeros([BP, BC], tl.float64)
    second = tl.zeros([BP, BC], tl.float64)
    at = partials + group.to(tl.int64) * chunks * channels
    for start in range(0, chunks, BP):
        chunk = start + tl.arange(0, BP)
        seen = (chunk < chunks)[:, None] & inside[None, :]
        each = at + chunk[:, None] * channels + column[None, :]
        first += tl.load(each, mask=seen, other=0.0)
        second += tl.load(each + groups.to(tl.int64) * chunks * channels, mask=seen, other=0.0)
    one, other = tl.sum(first, 0), tl.sum(second, 0)
    if MOMENTS:
        one = one / count
        other = other / count - one * one
        other = tl.where(other < 0.0, 0.0, other)  # NaN stays
    if NORMED:
        write_constants(
            one, other, weight, bias, inverse, scale, means, variances, group, column, inside, channels, stride,
            epsilon, count, 1,
        )  # fmt: skip
    totals += group * channels + column
    tl.store(totals, one, mask=inside)
    tl.store(totals + groups * channels, other, mask=inside)


@triton.jit(do_not_specialize=["rows", "images"])
def scale_shift_of_tile(
    x, shortcut, y, scale, shift, mask, rows, width, channels, images,
    ACTIVATION: tl.constexpr, SHORTCUT: tl.constexpr, MASKED: tl.constexpr, FOLDED: tl.constexpr,
    EVEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """act((x * scale + shift) * mask + shortcut)."""
    tiles = tl.cdiv(width, BC)
    group, start = tl.program_id(1).to(tl.int64), (tl.program_id(0) // tiles) * BR
    column = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    row = start + tl.arange(0, BR)
    inside = column < width
    seen = (row < rows)[:, None] & inside[None, :]
    base = (group * rows + start) * width
    within = tl.arange(0, BR)[:, None] * width + column[None, :]
    v = _load(x + base + within, seen, EVEN)
    if SHORTCUT:
        beside = _load(shortcut + base + within, seen, EVEN)
    v = v * _channel(scale, group, column, inside, channels, FOLDED)
    v += _channel(shift, group, column, inside, channels, FOLDED)
    v *= _factor(mask, group, row, rows, images, MASKED)
    if SHORTCUT:
        v += beside
    tl.store(y + base + within, activated(v, ACTIVATION).to(y.dtype.element_ty), mask=None if EVEN else seen)


@triton.jit(do_not_specialize=["rows", "images"])
def norm_gradient_of_tile(
    d, x, dx, scale, shift, a, b, c, mask, rows, width, channels, images,
    ACTIVATION: tl.constexpr, MASKED: tl.constexpr, FOLDED: tl.constexpr,
    EVEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """a * mask * dz + b * x + c."""
    tiles = tl.cdiv(width, BC)
    group, start = tl.program_id(1).to(tl.int64), (tl.program_id(0) // tiles) * BR
    column = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    row = start + tl.arange(0, BR)
    inside = column < width
    seen = (row < rows)[:, None] & inside[None, :]
    base = (group * rows + start) * width
    within = tl.arange(0, BR)[:, None] * width + column[None, :]
    g, v = _load(d + base + within, seen, EVEN), _load(x + base + within, seen, EVEN)
    m = _factor(mask, group, row, rows, images, MASKED)
    if ACTIVATION is not None:
        z = v * _channel(scale, group, column, inside, channels, FOLDED)
        z = (z + _channel(shift, group, column, inside, channels, FOLDED)) * m
        g = behind(g, z, ACTIVATION)
    g = g * m * _channel(a, group, column, inside, channels, FOLDED)
    g += v * _channel(b, group, column, inside, channels, FOLDED)
    g += _channel(c, group, column, inside, channels, FOLDED)
    tl.store(dx + base + within, g.to(dx.dtype.element_ty), mask=None if EVEN else seen)


@triton.jit(do_not_specialize=["count", "replicas"])
def forward_constants_of_channels(
    mean, var, weight, bias, inverse, scale, means, variances, channels, stride, epsilon, count, replicas,
    BC: tl.constexpr,
):  # fmt: skip
    """`write_constants` of moments that replicas share."""
    group = tl.program_id(1)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < channels
    at = group * channels + column
    mu, v = tl.load(mean + at, mask=inside).to(tl.float64), tl.load(var + at, mask=inside).to(tl.float64)
    write_constants(
        mu, v, weight, bias, inverse, scale, means, variances, group, column, inside, channels, stride, epsilon, count,
        replicas,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "count"])
def backward_constants_of_channels(
    sums, moments, mean, inverse, weight, factors, dweight, dbias, groups, channels, count,
    BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The factors of a norm's gradient, and the gradients of its weight and bias."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < channels
    gamma = tl.load(weight + column, mask=inside).to(tl.float64)[None, :]
    weights = tl.zeros([BG, BC], tl.float64)
    biases = tl.zeros([BG, BC], tl.float64)
    for start in range(0, groups, BG):
        group = start + tl.arange(0, BG)
        seen = (group < groups)[:, None] & inside[None, :]
        at = group[:, None] * channels + column[None, :]
        total = tl.load(sums + at, mask=seen, other=0.0).to(tl.float64)
        mu = tl.load(mean + at, mask=seen, other=0.0).to(tl.float64)
        inv = tl.load(inverse + at, mask=seen, other=0.0).to(tl.float64)
        normal = inv * (tl.load(moments + at, mask=seen, other=0.0).to(tl.float64) - mu * total)
        a = gamma * inv
        b = -a * inv * normal / count
        tl.store(factors + at, a, mask=seen)
        tl.store(factors + groups * channels + at, b, mask=seen)
        tl.store(factors + 2 * groups * channels + at, -a * total / count - b * mu, mask=seen)
        weights += normal
        biases += total
    tl.store(dweight + column, tl.sum(weights, 0), mask=inside)
    tl.store(dbias + column, tl.sum(biases, 0), mask=inside)
