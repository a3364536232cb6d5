"""The fused form of a 1x1 convolution that widens, its norm and its activation: nothing wide is kept but the output."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.batch import Batch
from paceline.model.kernels import expand
from paceline.model.kernels.bottleneck import (
    ROWS_PER_CHANNEL,
    compute_weight,
    gram_for,
    like_parameter,
    wide_weight,
    widened_norm,
)
from paceline.model.kernels.gram import Scatter
from paceline.model.kernels.norm import as_images, as_rows
from paceline.model.kernels.rows import Normed
from paceline.model.norm import BatchNormAct

TOGETHER = 8
"""The kernels take channels in multiples of this."""
WIDEST = 128
"""So many narrow channels fit the kernels."""
FACTOR = 2
"""A convolution that widens less than this keeps its output, which costs little more than its input."""


def can_expand(layer: nn.Conv2d, norm: nn.Module) -> bool:
    """Whether a convolution and the norm behind it have the form that is fused here."""
    narrow, wide = layer.in_channels, layer.out_channels
    return (
        type(layer) is nn.Conv2d
        and isinstance(norm, BatchNormAct)
        and (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)
        and layer.bias is None
        and narrow % TOGETHER == wide % TOGETHER == 0
        and narrow <= WIDEST
        and wide >= FACTOR * narrow
    )


def expansion_pays(x: Tensor, groups: int) -> bool:
    """Whether so many norm groups of these images have enough rows each."""
    return x.numel() >= ROWS_PER_CHANNEL * groups * x.shape[1] ** 2


def fused_expansion(layer: nn.Conv2d, norm: BatchNormAct, x: Tensor, batch: Batch) -> Tensor:
    """The activation of the normalized convolution in training."""
    x = x.to(compute_weight(layer, x.dtype).dtype)
    y = _Expansion.apply(x, layer.weight, norm.weight, norm.bias, layer, norm, batch)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


class _Expansion(torch.autograd.Function):
    """act(norm(x W^T)), which keeps x and small matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, _scale: Tensor, _shift: Tensor, layer: nn.Conv2d, norm: BatchNormAct,
        batch: Batch,
    ) -> Tensor:  # fmt: skip
        # The small matrices are float32, which autocast would round.
        with torch.autocast(x.device.type, enabled=False):
            data, weight = as_rows(x, len(batch.statistics)), compute_weight(layer, x.dtype).flatten(1)
            scatter = gram_for(x).row_scatter(data)
            normed, weight_scatter = widened_norm(layer, norm, data, scatter, batch)
            y = expand_for(x).expanded(data, weight, normed.scale, normed.shift, norm.activation)
        ctx.save_for_backward(data, weight, *scatter, weight_scatter, *normed)
        ctx.layer, ctx.norm, ctx.shape = layer, norm, x.shape
        return as_images(y, x.shape).data  # no view of y for autograd, which lets nobody change such outputs in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, matrix, weight_scatter, *saved = ctx.saved_tensors
        normed, activation, norm, kernels = Normed(*saved), ctx.norm.activation, ctx.norm, expand_for(x)
        dy = as_rows(gradients[0], len(x))
        product, sums = kernels.expansion_sums(dy, x, weight, normed.scale, normed.shift, activation)
        wide, scatter = wide_weight(ctx.layer, x.dtype).flatten(1), Scatter(mean, matrix)
        d_scale, d_shift, widened = gram_for(x).widened_gradient(
            product, sums, wide, scatter, weight_scatter, normed, x.shape[1], x.dtype, norm.shared
        )
        dx = None
        if ctx.needs_input_grad[0]:
            rows = kernels.expansion_gradient(dy, x, weight, normed.scale, normed.shift, activation, widened)
            dx = as_images(rows, ctx.shape)
        return dx, like_parameter(ctx.layer.weight, widened.weight), d_scale, d_shift, None, None, None


def expand_for(x: Tensor) -> ModuleType:
    """The operations of expand.py for the device of a tensor."""
    if not x.is_cuda or x.dtype == torch.float64:
        return expand
    from paceline.model.kernels import expand_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return expand_triton
