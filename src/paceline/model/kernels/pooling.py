"""Max-pools and mean-pools of one kernel for each pass, means of whole pictures, and a bias with the ReLU behind it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.model.kernels import windows
from paceline.model.kernels.norm import as_images, as_rows, rows_for
from paceline.model.kernels.windows import Window

LARGEST = 11
"""Windows of a larger side have more places than 8 bits tell apart."""


def fused_max_pool(x: Tensor, window: Window) -> Tensor:
    """The largest number of each window."""
    y: Tensor = _MaxPool.apply(x, window)  # type: ignore[no-untyped-call]
    return y


def mean_pool(x: Tensor, size: int, inner: bool, fused: bool) -> Tensor:
    """The mean over the square around each pixel; zeros around the picture count unless it is `inner`."""
    y: Tensor = _MeanPool.apply(x, size, inner, _windows_for(x) if fused else windows)  # type: ignore[no-untyped-call]
    return y


def picture_mean(x: Tensor) -> Tensor:
    """The mean over each picture."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return x.mean((2, 3))
    y: Tensor = _PictureMean.apply(x)  # type: ignore[no-untyped-call]
    return y


def fused_bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """relu(x + bias), with one number of the bias for each channel."""
    y: Tensor = _BiasRelu.apply(x, bias)  # type: ignore[no-untyped-call]
    return y


class _MaxPool(torch.autograd.Function):
    """Keeps where each number comes from, in 8 bits on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        assert window.size <= LARGEST
        y, place = _windows_for(x).max_windows(_channels_last(x), window)
        ctx.save_for_backward(place)
        ctx.shape, ctx.window = x.shape, window
        assert isinstance(y, Tensor)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy = _channels_last(gradients[0])
        return _windows_for(dy).max_windows_gradient(dy, *ctx.saved_tensors, ctx.shape, ctx.window), None


class _MeanPool(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, inner: bool, kernels: ModuleType) -> Tensor:
        ctx.how, ctx.kernels = (size, inner), kernels
        y = kernels.mean_windows(_channels_last(x), size, inner)
        assert isinstance(y, Tensor)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.kernels.mean_windows_gradient(_channels_last(gradients[0]), *ctx.how), None, None, None


class _PictureMean(torch.autograd.Function):
    """Has torch's bits. The gradient is the same for all pixels, so it is a view of one number for each channel; torch
    writes it out, in an order that channels-last kernels copy once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        count = ctx.shape[2] * ctx.shape[3]
        return (gradients[0] / count)[:, :, None, None].expand(ctx.shape)


class _BiasRelu(torch.autograd.Function):
    """Keeps the output, which tells where the ReLU let pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        shift = bias.to(torch.promote_types(bias.dtype, torch.float32))[None]
        y = rows_for(x).scale_shift(as_rows(x, 1), torch.ones_like(shift), shift, "relu")
        out = as_images(y, x.shape).data  # no view of y for autograd, which lets nobody change such outputs in place
        ctx.save_for_backward(out, shift)
        ctx.bias_type = getattr(bias, "grad_dtype", None) or bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (out, shift), dy = ctx.saved_tensors, gradients[0]
        y = as_rows(out, 1)
        sums, _, d = rows_for(y).gradient_sums(as_rows(dy, 1), y, torch.ones_like(shift), shift, "relu", out=y)
        return as_images(d, dy.shape), sums[0].to(ctx.bias_type)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _windows_for(x: Tensor) -> ModuleType:
    """The operations for the device of a tensor."""
    if not x.is_cuda or x.dtype == torch.float64:
        return windows
    from paceline.model.kernels import windows_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return windows_triton
