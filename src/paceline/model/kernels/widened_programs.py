"""Triton programs for the small matrices between the products of a bottleneck; gram_triton.py launches them."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from paceline.model.kernels.rows_programs import write_moments


@triton.jit(do_not_specialize=["rows", "N"])
def widened_moments_program(
    w, ws, a_mean, mean, var, weight, bias, inverse, scale, means, variances, rows, N, stride, epsilon,
    C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The moments of rows of the weight times what the scatter belongs to, and what a norm makes of them."""
    group = tl.program_id(1)
    n = tl.program_id(0) * BR + tl.arange(0, BR)
    m = tl.zeros([BR, BC], tl.float64)
    v = tl.zeros([BR, BC], tl.float64)
    for k in range(0, C, BC):
        c = k + tl.arange(0, BC)
        own = c < C
        row = tl.load(w + n[:, None] * C + c[None, :], mask=own[None, :], other=0.0).to(tl.float64)
        m += row * tl.load(a_mean + group * C + c, mask=own, other=0.0).to(tl.float64)[None, :]
        at = ws + (group * N + n).to(tl.int64)[:, None] * C + c[None, :]
        v += row * tl.load(at, mask=own[None, :], other=0.0).to(tl.float64)
    write_moments(
        tl.sum(m, 1), tl.maximum(tl.sum(v, 1) / rows, 0.0), mean, var, weight, bias, inverse, scale, means, variances,
        group, n, N, stride, epsilon, rows, NORMED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "G", "N"])
def widened_gradient_program(
    product, sums, w, a_mean, ws, mean, inverse, scale, d_weight, scaled, weighted, cv, d_gamma, d_beta,
    rows, G, N, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Row by row of the weight: see the twin; all rows of a group are this replica's."""
    n = tl.program_id(0) * BR + tl.arange(0, BR)
    gamma = tl.zeros([BR], tl.float64)
    beta = tl.zeros([BR], tl.float64)
    for g in range(G):
        s = tl.load(sums + g * N + n).to(tl.float64)
        q = tl.zeros([BR, BC], tl.float64)
        for k in range(0, C, BC):
            c = k + tl.arange(0, BC)
            at = (g * N + n).to(tl.int64)[:, None] * C + c[None, :]
            own = (c < C)[None, :]
            weight = tl.load(w + n[:, None] * C + c[None, :], mask=own, other=0.0).to(tl.float64)
            centered = tl.load(product + at, mask=own, other=0.0).to(tl.float64)
            centered -= s[:, None] * tl.load(a_mean + g * C + c, mask=c < C, other=0.0).to(tl.float64)[None, :]
            q += centered * weight
        deviation = tl.sum(q, 1)
        inv = tl.load(inverse + g * N + n).to(tl.float64)
        sc = tl.load(scale + g * N + n).to(tl.float64)
        m1 = s / rows
        m2 = deviation * inv * inv / rows
        gamma += inv * deviation
        beta += s
        tl.store(cv + g * N + n, (sc * (m2 * tl.load(mean + g * N + n).to(tl.float64) - m1)).to(tl.float32))
        for k in range(0, C, BC):
            c = k + tl.arange(0, BC)
            at = (g * N + n).to(tl.int64)[:, None] * C + c[None, :]
            own = (c < C)[None, :]
            weight = tl.load(w + n[:, None] * C + c[None, :], mask=own, other=0.0).to(tl.float32)
            centered = tl.load(product + at, mask=own, other=0.0).to(tl.float64)
            centered -= s[:, None] * tl.load(a_mean + g * C + c, mask=c < C, other=0.0).to(tl.float64)[None, :]
            centered -= m2[:, None] * tl.load(ws + at, mask=own, other=0.0).to(tl.float64)
            dw = (sc[:, None] * centered).to(tl.float32)
            to = d_weight + n[:, None] * C + c[None, :]
            if g > 0:
                dw += tl.load(to, mask=own, other=0.0)
            tl.store(to, dw, mask=own)
            by_scale = sc.to(tl.float32)[:, None] * weight
            tl.store(scaled + at, by_scale.to(scaled.dtype.element_ty), mask=own)
            tl.store(weighted + at, -m2.to(tl.float32)[:, None] * by_scale, mask=own)
    tl.store(d_gamma + n, gamma.to(tl.float32))
    tl.store(d_beta + n, beta.to(tl.float32))
