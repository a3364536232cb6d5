"""Triton programs behind gate_triton.py: each works on rows of one image, for a tile of its channels."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from paceline.model.kernels.rows_programs import activated, behind, sigmoid


@triton.jit
def _tile(channels, images, BC: tl.constexpr):
    """The image of this program, the columns of its tile, which of them there are, and its norm group's columns."""
    image = tl.program_id(1).to(tl.int64)
    column = (tl.program_id(0) % tl.cdiv(channels, BC)) * BC + tl.arange(0, BC)
    return image, column, column < channels, image // images * channels + column


@triton.jit
def _constant(values, at, inside):
    return tl.load(values + at, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "chunk_rows", "images"])
def outputs_of_chunks(
    x, scale, shift, partials, rows, channels, chunk_rows, images,
    ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sum of y over a chunk of an image's rows."""
    image, column, inside, own = _tile(channels, images, BC)
    tiles = tl.cdiv(channels, BC)
    chunk, chunks = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    factor, term = _constant(scale, own, inside), _constant(shift, own, inside)
    s = tl.zeros([BR, BC], tl.float32)
    end = tl.minimum((chunk + 1) * chunk_rows, rows)
    x += image * rows * channels
    for first in range(chunk * chunk_rows, end, BR):
        row = first + tl.arange(0, BR)
        seen = (row < end)[:, None] & inside[None, :]
        at = row[:, None] * channels + column[None, :]
        y = activated(tl.load(x + at, mask=seen, other=0.0).to(tl.float32) * factor + term, ACTIVATION)
        s += tl.where(seen, y, 0.0)
    tl.store(partials + (image * chunks + chunk) * channels + column, tl.sum(s, 0), mask=inside)


@triton.jit(do_not_specialize=["rows", "channels", "chunks", "width"])
def squeeze_of_image(
    partials, weight, bias, hidden, rows, channels, chunks, width,
    ACTIVATION: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BH hidden numbers of an image, by the sums that its chunks have left."""
    image = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    own = h < width
    s = tl.zeros([BH, BC], tl.float32)
    for first in range(0, channels, BC):
        c = first + tl.arange(0, BC)
        inside = c < channels
        sums = tl.zeros([BP, BC], tl.float32)
        for start in range(0, chunks, BP):
            chunk = start + tl.arange(0, BP)
            at = (image * chunks + chunk)[:, None] * channels + c[None, :]
            sums += tl.load(partials + at, mask=(chunk < chunks)[:, None] & inside[None, :], other=0.0)
        factor = tl.load(weight + h[:, None] * channels + c[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        s += factor.to(tl.float32) * (tl.sum(sums, 0) / rows)[None, :]
    value = tl.sum(s, 1) + tl.load(bias + h, mask=own, other=0.0).to(tl.float32)
    tl.store(hidden + image * width + h, activated(value, ACTIVATION), mask=own)


@triton.jit(do_not_specialize=["channels", "width"])
def excite_of_image(
    hidden, weight, bias, factors, channels, width, GATE: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr
):
    """The factors of BC channels of an image, by all its hidden numbers, at most BH."""
    image = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, BH)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    own, inside = h < width, c < channels
    value = tl.load(hidden + image * width + h, mask=own, other=0.0)
    factor = tl.load(weight + c[:, None] * width + h[None, :], mask=inside[:, None] & own[None, :], other=0.0)
    z = tl.sum(factor.to(tl.float32) * value[None, :], 1) + tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    if GATE == "sigmoid":
        z = sigmoid(z)
    else:
        z = z / 6.0 + 0.5
        z = tl.where(z < 0.0, 0.0, tl.where(z > 1.0, 1.0, z))
    tl.store(factors + image * channels + c, z, mask=inside)


@triton.jit(do_not_specialize=["rows", "images"])
def gated_of_tile(
    x, y, scale, shift, gate, rows, channels, images,
    ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y times the factor of its image and channel."""
    image, column, inside, own = _tile(channels, images, BC)
    row = tl.program_id(0) // tl.cdiv(channels, BC) * BR + tl.arange(0, BR)
    seen = (row < rows)[:, None] & inside[None, :]
    x += image * rows * channels
    y += image * rows * channels
    at = row[:, None] * channels + column[None, :]
    z = tl.load(x + at, mask=seen, other=0.0).to(tl.float32) * _constant(scale, own, inside)
    value = activated(z + _constant(shift, own, inside), ACTIVATION)
    value = value * _constant(gate, image * channels + column, inside)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "images"])
def gate_sums_of_chunks(
    d, x, mean, scale, shift, partials, rows, channels, chunk_rows, images,
    ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The five sums of `GateSums` over a chunk of an image's rows."""
    image, column, inside, own = _tile(channels, images, BC)
    tiles = tl.cdiv(channels, BC)
    chunk, chunks = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    factor, term = _constant(scale, own, inside), _constant(shift, own, inside)
    center = _constant(mean, own, inside)
    outputs = tl.zeros([BR, BC], tl.float32)
    slopes = tl.zeros([BR, BC], tl.float32)
    products = tl.zeros([BR, BC], tl.float32)
    plain_slopes = tl.zeros([BR, BC], tl.float32)
    plain_products = tl.zeros([BR, BC], tl.float32)
    end = tl.minimum((chunk + 1) * chunk_rows, rows)
    d += image * rows * channels
    x += image * rows * channels
    for first in range(chunk * chunk_rows, end, BR):
        row = first + tl.arange(0, BR)
        seen = (row < end)[:, None] & inside[None, :]
        at = row[:, None] * channels + column[None, :]
        g = tl.load(d + at, mask=seen, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
        z = v * factor + term
        steep = tl.where(seen, behind(tl.full([BR, BC], 1.0, tl.float32), z, ACTIVATION), 0.0)
        off = steep * (v - center)
        outputs += g * activated(z, ACTIVATION)
        slopes += g * steep
        products += g * off
        plain_slopes += steep
        plain_products += off
    at = partials + (image * chunks + chunk) * channels + column
    step = tl.num_programs(1).to(tl.int64) * chunks * channels
    tl.store(at, tl.sum(outputs, 0), mask=inside)
    tl.store(at + step, tl.sum(slopes, 0), mask=inside)
    tl.store(at + 2 * step, tl.sum(products, 0), mask=inside)
    tl.store(at + 3 * step, tl.sum(plain_slopes, 0), mask=inside)
    tl.store(at + 4 * step, tl.sum(plain_products, 0), mask=inside)


@triton.jit(do_not_specialize=["rows", "images"])
def gated_gradient_of_tile(
    d, x, dx, scale, shift, gate, term, a, b, c, rows, channels, images,
    ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """a dz + b x + c, where dz is (d gate + term) times the slope of the activation."""
    image, column, inside, own = _tile(channels, images, BC)
    row = tl.program_id(0) // tl.cdiv(channels, BC) * BR + tl.arange(0, BR)
    seen = (row < rows)[:, None] & inside[None, :]
    d += image * rows * channels
    x += image * rows * channels
    dx += image * rows * channels
    at = row[:, None] * channels + column[None, :]
    g = tl.load(d + at, mask=seen, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    beside = image * channels + column
    g = g * _constant(gate, beside, inside) + _constant(term, beside, inside)
    z = v * _constant(scale, own, inside) + _constant(shift, own, inside)
    g = behind(g, z, ACTIVATION) * _constant(a, own, inside)
    g += v * _constant(b, own, inside) + _constant(c, own, inside)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=seen)
