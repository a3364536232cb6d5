"""3x3 convolutions of few channels in float32 on CUDA, for which cuDNN has no channels-last kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEW = (16, 32, 64)
"""So many channels may go in, and come out. With more, cuDNN is as fast."""


class NarrowConv(nn.Conv2d):
    """A 3x3 convolution of few channels, without a bias, that keeps the side or halves it."""

    fused: bool = False
    """Whether it is computed by kernels of our own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and not torch.compiler.is_compiling():
            y: Tensor = _Convolution.apply(x, self.weight, self.stride[0])  # type: ignore[no-untyped-call]
            return y
        return super().forward(x)


PLAIN_CONVS = (nn.Conv2d, NarrowConv)
"""The types of convolutions that do nothing with a picture before they look at it."""


class _Convolution(torch.autograd.Function):
    """Keeps its input, as torch's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        from paceline.model.kernels import convolution_triton as kernels  # noqa: PLC0415 - it comes with torch for CUDA

        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.kernels = stride, kernels
        return kernels.convolved(x, weight, stride)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = ctx.kernels.picture_gradient(dy, weight, x.shape, ctx.stride) if needs_x else None
        return dx, ctx.kernels.weight_gradient(x, dy, ctx.stride) if needs_weight else None, None
