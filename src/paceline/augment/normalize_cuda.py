"""Normalization of 8-bit images by mean and standard deviation as one Triton kernel, with the bits of torch's three."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

PIXELS = 4096


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def _normalize(images, mean, std, normal, total, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803 - constant when compiled
    first = tl.program_id(0).to(tl.int64) * PIXELS
    at = first + tl.arange(0, PIXELS)
    channel = ((first % CHANNELS).to(tl.int32) + tl.arange(0, PIXELS)) % CHANNELS
    value = tl.load(images + at, mask=at < total, other=0).to(tl.float32)
    value = tl.div_rn(value - tl.load(mean + channel), tl.load(std + channel))
    tl.store(normal + at, value, mask=at < total)


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images - mean) / std in float32, of 8-bit images in channels-last order."""
    normal = torch.empty_like(images, dtype=torch.float32)
    total = images.numel()
    _normalize[(triton.cdiv(total, PIXELS),)](images, mean, std, normal, total, images.shape[1], PIXELS, num_warps=8)
    return normal
