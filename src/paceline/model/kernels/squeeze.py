"""A batch norm, its activation and squeeze-and-excite behind it, in a training pass, without a tensor between them.

The factors of squeeze-and-excite depend on means of what the norm gives, so autograd sees two operations: one gives the
means, and carries the images on as they are; the other normalizes, activates and multiplies them in one pass. Going
back, the second leaves all sums that either needs, and the first computes the gradient of the images.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline.model.batch import Batch
from paceline.model.kernels import gate as plain
from paceline.model.kernels.folded import FoldedNorm
from paceline.model.kernels.gate import Excite, GateSums
from paceline.model.kernels.norm import (
    as_images,
    as_rows,
    norm_gradient_by_sums,
    norm_of_rows,
)
from paceline.model.kernels.rows import Normed

if TYPE_CHECKING:
    from paceline.model.norm import BatchNormAct


class Gate(Protocol):
    """What gives a factor for each channel of each image."""

    def factors(self, means: Tensor) -> Tensor:
        """The factors [images, channels, 1, 1] by the means of all channels, in the same shape."""


def fused_squeeze(norm: BatchNormAct, excite: Gate, x: Tensor, batch: Batch) -> Tensor:
    """Squeeze-and-excite of the normalized and activated images."""
    site = _Site(norm, batch)
    means, carried = _Squeeze.apply(x, norm.weight, norm.bias, site)  # type: ignore[no-untyped-call]
    y = _Excite.apply(carried, excite.factors(means), site)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


def folded_squeeze(norm: FoldedNorm, excite: Excite, x: Tensor) -> Tensor:
    """Squeeze-and-excite of the normalized and activated images in evaluation."""
    data, kernels = as_rows(x, 1), gate_for(x)
    with torch.autocast(x.device.type, enabled=False):
        factors = kernels.image_factors(data, *norm, len(x), excite)
        return as_images(kernels.gated(data, *norm, factors), x.shape)


class _Site:
    """What the two operations of a micro-batch share."""

    def __init__(self, norm: BatchNormAct, batch: Batch) -> None:
        self.norm, self.batch = norm, batch
        self.normed: Normed | None = None
        self.sums: GateSums | None = None
        self.gate: Tensor | None = None


class _Squeeze(torch.autograd.Function):
    """The means of act(norm(x)) over each picture, and x itself for `_Excite`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor, site: _Site) -> tuple[Tensor, Tensor]:
        norm, data = site.norm, as_rows(x, len(site.batch.statistics))
        site.normed = norm_of_rows(norm, data, site.batch)
        scale, shift = site.normed.scale, site.normed.shift
        means = gate_for(x).image_means(data, scale, shift, norm.activation, len(x))
        ctx.save_for_backward(data, weight, *site.normed)
        ctx.site, ctx.pixels = site, x.shape[2] * x.shape[3]
        return means[:, :, None, None], as_images(data, x.shape).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, *normed = ctx.saved_tensors
        site, norm = ctx.site, Normed(*normed)
        sums, gate, d = site.sums, site.gate, as_rows(gradients[1], len(x))
        site.sums = site.gate = None
        term = gradients[0].flatten(1).to(gate.dtype) / ctx.pixels
        own, products = (
            _over_images(gate * of_d + term * of_one, len(x))
            for of_d, of_one in ((sums.slopes, sums.plain_slopes), (sums.products, sums.plain_products))
        )
        products = products + norm.mean * own
        a, b, c, dweight, dbias = norm_gradient_by_sums(norm, weight, own, products, x.shape[1], site.norm.shared)
        kernels, activation = gate_for(x), site.norm.activation
        dx = kernels.gated_gradient(d, x, norm.scale, norm.shift, activation, gate, term.contiguous(), (a, b, c))
        return as_images(dx, gradients[1].shape), dweight, dbias, None


class _Excite(torch.autograd.Function):
    """act(norm(x)) times the factors; the gradient of the images goes back as it came, for `_Squeeze` to finish."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, site: _Site) -> Tensor:
        normed = site.normed
        assert normed is not None
        site.normed = None
        data = as_rows(x, len(normed.mean))
        gate = factors.flatten(1).to(normed.scale.dtype).contiguous()
        y = gate_for(x).gated(data, normed.scale, normed.shift, site.norm.activation, gate)
        ctx.save_for_backward(data, gate, *normed)
        ctx.site, ctx.factor_type = site, factors.dtype
        return as_images(y, x.shape).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, gate, *normed = ctx.saved_tensors
        norm, site = Normed(*normed), ctx.site
        d = as_rows(gradients[0], len(x))
        sums = gate_for(x).gate_sums(
            d, x, norm.mean.to(norm.scale.dtype), norm.scale, norm.shift, site.norm.activation, len(gate)
        )
        site.sums, site.gate = sums, gate
        return as_images(d, gradients[0].shape), sums.outputs[:, :, None, None].to(ctx.factor_type), None


def _over_images(values: Tensor, groups: int) -> Tensor:
    """The sum over the images of each group, in float64."""
    return values.view(groups, -1, values.shape[1]).sum(1, dtype=torch.float64)


def gate_for(x: Tensor) -> ModuleType:
    """The operations for the device of a tensor."""
    if not x.is_cuda or x.dtype == torch.float64:
        return plain
    from paceline.model.kernels import gate_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return gate_triton
