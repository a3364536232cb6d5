"""The Triton program of a 1x1 convolution and the norm behind it; product_triton.py launches it."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from paceline.model.kernels.rows_programs import activated


@triton.jit(do_not_specialize=["rows", "n8", "k8"])
def product_act_program(
    a, w, scale, shift, shortcut, y, rows, n8, k8,
    ACTIVATION: tl.constexpr, SHORTCUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """act(a w^T scale + shift + shortcut) for BM rows of a norm group and BN columns."""
    # Widths come in eights, so that loads are of 16 bytes.
    N = n8 * 8
    K = k8 * 8
    blocks = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // blocks * BM
    r = tl.arange(0, BM)
    inside = r < rows - first
    cols = pid % blocks * BN + tl.arange(0, BN)
    there = cols < N
    group = tl.program_id(1).to(tl.int64)
    start = group * rows + first
    own = a + start * K
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        left = tl.load(own + r[:, None] * K + ks[None, :], mask=inside[:, None] & (ks < K)[None, :], other=0.0)
        right = tl.load(w + cols[None, :] * K + ks[:, None], mask=there[None, :] & (ks < K)[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    acc = acc * tl.load(scale + group * N + cols, mask=there, other=0.0).to(tl.float32)[None, :]
    acc += tl.load(shift + group * N + cols, mask=there, other=0.0).to(tl.float32)[None, :]
    at = r[:, None] * N + cols[None, :]
    seen = inside[:, None] & there[None, :]
    if SHORTCUT:
        acc += tl.load(shortcut + start * N + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(y + start * N + at, activated(acc, ACTIVATION).to(y.dtype.element_ty), mask=seen)
