"""The fused form of a stem: its 7x7 convolution over pixels in fours, and norm, ReLU and max-pool in one pass."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.batch import Batch
from paceline.model.kernels import pool
from paceline.model.kernels.folded import FoldedNorm
from paceline.model.kernels.norm import as_rows, norm_gradient_by_sums, norm_of_rows, rows_for
from paceline.model.kernels.rows import Normed
from paceline.model.norm import BatchNormAct

if TYPE_CHECKING:
    from paceline.model.resnet import Stem

CHANNELS = 16
"""Channels of four pixels, filled up to what tensor cores like."""


def can_fuse_stem(stem: Stem) -> bool:
    """Whether a stem has the form that is fused here."""
    layer, norm = stem.conv, stem.norm
    return (
        stem.pool is not None
        and isinstance(norm, BatchNormAct)
        and norm.activation == "relu"
        and (layer.kernel_size, layer.stride, layer.in_channels <= CHANNELS // 4) == ((7, 7), (2, 2), True)
        and layer.out_channels in (16, 32, 64, 128)
    )


def fits_stem(x: Tensor) -> bool:
    """Whether pictures can be halved twice without a rest."""
    return x.shape[2] % 4 == 0 and x.shape[3] % 4 == 0


def fused_stem(stem: Stem, x: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """The stem's output in training, computed in this type."""
    assert isinstance(stem.norm, BatchNormAct)
    y = _Stem.apply(x, stem.conv.weight, stem.norm.weight, stem.norm.bias, stem.norm, batch, dtype)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


def folded_stem(weight: Tensor, norm: FoldedNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The stem's output in evaluation, computed in this type."""
    kernels = pool_for(x)
    with torch.autocast(x.device.type, enabled=False):
        raw = F.conv2d(kernels.unshuffle(x, dtype, CHANNELS), in_fours(weight, dtype))
        y = kernels.pool_alone(raw.contiguous(memory_format=torch.channels_last), norm.scale, norm.shift)
    assert isinstance(y, Tensor)
    return y


def in_fours(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of a 7x7 convolution with stride 2 as those of a 4x4 one over pixels in fours."""
    outputs, inputs = weight.shape[:2]
    padded = F.pad(weight, (1, 0, 1, 0)).view(outputs, inputs, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4)
    filled = F.pad(padded.reshape(outputs, 4 * inputs, 4, 4), (0, 0, 0, 0, 0, CHANNELS - 4 * inputs))
    return filled.to(dtype).contiguous(memory_format=torch.channels_last)


def from_fours(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the 7x7 weights by that of the 4x4 ones."""
    outputs, inputs = weight.shape[:2]
    parts = gradient[:, : 4 * inputs].reshape(outputs, inputs, 2, 2, 4, 4).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(outputs, inputs, 8, 8)[:, :, 1:, 1:]


class _Stem(torch.autograd.Function):
    """Convolution, norm, ReLU and max-pool; the images have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor, _beta: Tensor, norm: BatchNormAct, batch: Batch,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        assert not x.requires_grad, "nothing learns before the stem"
        kernels, groups = pool_for(x), len(batch.statistics)
        with torch.autocast(x.device.type, enabled=False):
            fours, by_fours = kernels.unshuffle(x, dtype, CHANNELS), in_fours(weight, dtype)
            raw = F.conv2d(fours, by_fours).contiguous(memory_format=torch.channels_last)
        data = as_rows(raw, groups)
        normed = norm_of_rows(norm, data, batch)
        y, position, top = kernels.pool_forward(raw, normed.scale, normed.shift)
        ctx.save_for_backward(fours, weight, gamma, raw, position, top, *normed)
        ctx.norm, ctx.dtype = norm, dtype
        assert isinstance(y, Tensor)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fours, weight, gamma, raw, position, top, *rest = ctx.saved_tensors  # recomputation gives them out once
        normed, dy = Normed(*rest), gradients[0].contiguous(memory_format=torch.channels_last)
        groups = len(normed.scale)
        # Each number behind the pool comes from one pixel, so the sums over all pixels are those over what was pooled.
        sums, products, _ = rows_for(raw).gradient_sums(
            as_rows(dy, groups), as_rows(top, groups), normed.scale, normed.shift, "relu"
        )
        rows = raw.numel() // raw.shape[1] // groups
        gradient = norm_gradient_by_sums(normed, gamma, sums, products, rows, ctx.norm.shared)
        d_raw = pool_for(raw).pool_backward(dy, position, raw, gradient.a, gradient.b, gradient.c)
        _, d_weight, _ = torch.ops.aten.convolution_backward(
            d_raw, fours, in_fours(weight, ctx.dtype), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [False, True, False],
        )  # fmt: skip
        dtype = getattr(weight, "grad_dtype", None) or weight.dtype
        return None, from_fours(d_weight, weight).to(dtype), gradient.weight, gradient.bias, None, None, None


def pool_for(x: Tensor) -> ModuleType:
    """The operations for the device of a tensor."""
    if not x.is_cuda or x.dtype == torch.float64:
        return pool
    from paceline.model.kernels import pool_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return pool_triton
