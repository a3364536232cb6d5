"""Group norm and proxy norm by the kernels of batch norm: the rows of an image are a group, and the rest is small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.model.kernels.norm import NormGradient, as_images, as_rows, rows_for
from paceline.model.kernels.rows import Normed

if TYPE_CHECKING:
    from paceline.model.norm import GroupNormAct
    from paceline.settings.model import Activation


class GroupRule(NamedTuple):
    """Group norm: the moments of an image's channels give those of its groups of channels. In float64."""

    norm: GroupNormAct

    @property
    def activation(self) -> Activation | None:
        """What follows the norm."""
        return self.norm.activation

    def groups(self, images: int) -> int:
        """Each image is its own."""
        return images

    def normed(self, data: Tensor) -> Normed:
        """What both passes need, [images, channels] each."""
        own_mean, own_var = (values.double() for values in rows_for(data).moments(data))
        mean = self._means(own_mean)
        inverse = torch.rsqrt(self._means(own_var + (own_mean - mean).square()) + self.norm.epsilon)
        scale = self.norm.weight * inverse
        bias: Tensor | None = self.norm.bias  # proxy norm without activation has none
        shift = -mean * scale if bias is None else bias - mean * scale
        dtype = torch.promote_types(self.norm.weight.dtype, torch.float32)
        return Normed(mean, inverse, scale.to(dtype), shift.to(dtype))

    def gradient(self, normed: Normed, weight: Tensor, sums: Tensor, products: Tensor, rows: int) -> NormGradient:
        """The gradients by the sums of d and of d x over the rows of each image."""
        mean, inverse = normed.mean, normed.inverse
        sums, centered = sums.double(), products.double() - mean * sums
        m1 = self._means(weight * sums) / rows
        m2 = self._means(weight * centered) * inverse.square() / rows
        a, b = weight * inverse, -m2 * inverse
        c, dtype = -m1 * inverse - b * mean, normed.scale.dtype
        d_weight, d_bias = (inverse * centered).sum(0).to(weight.dtype), sums.sum(0).to(weight.dtype)
        return NormGradient(a.to(dtype), b.to(dtype), c.to(dtype), d_weight, d_bias)

    def _means(self, values: Tensor) -> Tensor:
        """The mean over the channels of each group, for each of its channels."""
        grouped = values.view(len(values), self.norm.groups, -1)
        return grouped.mean(2, keepdim=True).expand_as(grouped).flatten(1)


def fused_scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x times a factor plus a term for each channel, all three with gradients, in channels-last order."""
    y = _ScaleShift.apply(x, scale, shift)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


class _ScaleShift(torch.autograd.Function):
    """One pass over the images forward; backward one for both sums and one for the gradient of the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        data, wide = as_rows(x, 1), [values[None].contiguous() for values in (scale, shift)]
        ctx.save_for_backward(data, *wide)
        return as_images(rows_for(x).scale_shift(data, *wide, None), x.shape).data  # no view, as in `FusedNorm`

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale, shift = ctx.saved_tensors
        d, kernels, dx = as_rows(gradients[0], 1), rows_for(x), None
        sums, products, _ = kernels.gradient_sums(d, x, scale, shift, None)
        if ctx.needs_input_grad[0]:
            dx = as_images(kernels.scale_shift(d, scale, torch.zeros_like(shift), None), gradients[0].shape)
        return dx, products[0].to(scale.dtype), sums[0].to(shift.dtype)
