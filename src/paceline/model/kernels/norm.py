"""Norm, mask, shortcut and activation of a training pass as one fused form that keeps little for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.model.kernels import rows
from paceline.model.kernels.rows import Normed, NormNumbers

if TYPE_CHECKING:
    from paceline.model.batch import Batch
    from paceline.model.norm import BatchNormAct, NormAct, SharedStatistics
    from paceline.settings.model import Activation


class NormGradient(NamedTuple):
    """The gradient before a norm as a d + b x + c, d being the one behind it, and those of its weight and bias."""

    a: Tensor
    b: Tensor
    c: Tensor
    weight: Tensor
    bias: Tensor


class NormRule(Protocol):
    """What a kind of norm makes of sums over the rows of its groups."""

    @property
    def activation(self) -> Activation | None:
        """What follows the norm."""

    def groups(self, images: int) -> int:
        """How many groups the rows of so many images are."""

    def normed(self, data: Tensor) -> Normed:
        """What both passes need for these rows of each group."""

    def gradient(self, normed: Normed, weight: Tensor, sums: Tensor, products: Tensor, rows: int) -> NormGradient:
        """The gradients by the sums of d and of d x over the rows of each group."""


class BatchRule(NamedTuple):
    """Batch norm in a pass: a group is the rows of a norm group, and statistics go to the batch's."""

    norm: BatchNormAct
    batch: Batch

    @property
    def activation(self) -> Activation | None:
        """What follows the norm."""
        return self.norm.activation

    def groups(self, images: int) -> int:  # noqa: ARG002 - the batch knows
        """How many norm groups the pass has."""
        return len(self.batch.statistics)

    def normed(self, data: Tensor) -> Normed:
        """What both passes need, by this replica's rows."""
        return norm_of_rows(self.norm, data, self.batch)

    def gradient(self, normed: Normed, weight: Tensor, sums: Tensor, products: Tensor, rows: int) -> NormGradient:
        """The gradients by this replica's sums."""
        return norm_gradient_by_sums(normed, weight, sums, products, rows, self.norm.shared)


def rows_for(x: Tensor) -> ModuleType:
    """The functions of `rows` that suit a tensor: Triton's on CUDA, else the plain ones."""
    if not x.is_cuda or x.dtype == torch.float64:
        return rows
    from paceline.model.kernels import rows_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return rows_triton


def as_rows(images: Tensor, groups: int) -> Tensor:
    """Images as [groups, rows, channels], without a copy if they lie in channels-last order."""
    return images.permute(0, 2, 3, 1).contiguous().view(groups, -1, images.shape[1])


def as_images(values: Tensor, shape: torch.Size) -> Tensor:
    """Rows as so many images, as high and wide as those of a shape, in channels-last order and without a copy."""
    count, _, height, width = shape
    return values.view(count, height, width, -1).permute(0, 3, 1, 2)


def fused_norm_act(norm: NormAct, rule: NormRule, x: Tensor, shortcut: Tensor | None, mask: Tensor | None) -> Tensor:
    """What a norm does to a micro-batch in training, in channels-last order."""
    y = FusedNorm.apply(x, norm.weight, norm.bias, shortcut, mask, rule)  # type: ignore[no-untyped-call]
    assert isinstance(y, Tensor)
    return y


class FusedNorm(torch.autograd.Function):
    """act(norm(x) * mask + shortcut) over the groups of a pass.

    Of the data it keeps x, and where there is a shortcut what tells the slope of the activation: the output for ReLU
    and ReLU6, the shortcut itself for the others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shortcut: Tensor | None, mask: Tensor | None,
        rule: NormRule,
    ) -> Tensor:  # fmt: skip
        kernels, groups, activation = rows_for(x), rule.groups(len(x)), rule.activation
        data, beside = as_rows(x, groups), None if shortcut is None else as_rows(shortcut, groups)
        factors = None if mask is None else mask.reshape(groups, -1).contiguous()
        normed = rule.normed(data)
        y = kernels.scale_shift(data, normed.scale, normed.shift, activation, beside, factors)
        out = as_images(y, x.shape).data  # no view of y for autograd, which lets nobody change such outputs in place
        told = activation in ("relu", "relu6")
        ctx.save_for_backward(
            data, weight,
            beside if activation is not None and not told else None, out if beside is not None and told else None,
            factors, *normed,
        )  # fmt: skip
        ctx.rule, ctx.has_bias = rule, bias is not None
        ctx.shortcut_type = None if shortcut is None else shortcut.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, shortcut, out, mask, mean, inverse, scale, shift = ctx.saved_tensors
        kernels, shape, activation = rows_for(x), gradients[0].shape, ctx.rule.activation
        d, out = as_rows(gradients[0], len(x)), None if out is None else as_rows(out, len(x))
        sums, moments, dz = kernels.gradient_sums(d, x, scale, shift, activation, shortcut, mask, out)
        normed = Normed(mean, inverse, scale, shift)
        a, b, c, dweight, dbias = ctx.rule.gradient(normed, weight, sums, moments, x.shape[1])
        if dz is not None:
            d, activation = dz, None
        dx = dshortcut = None
        if ctx.needs_input_grad[0]:
            dx = as_images(kernels.norm_gradient(d, x, scale, shift, a, b, c, activation, mask), shape)
        if ctx.needs_input_grad[3]:
            dshortcut = as_images(d, shape).to(ctx.shortcut_type)
        return dx, dweight, dbias if ctx.has_bias else None, dshortcut, None, None


def kernel_numbers(norm: BatchNormAct, batch: Batch) -> NormNumbers | None:
    """What kernels need for making a batch norm's constants; None where other replicas have to be asked first."""
    if norm.shared is not None:
        return None
    return NormNumbers(norm.weight, norm.bias, norm.epsilon, norm.columns(batch.statistics))


def norm_of_rows(norm: BatchNormAct, data: Tensor, batch: Batch) -> Normed:
    """A norm of the rows of each group, whose moments go to the batch's statistics."""
    kernels, numbers = rows_for(data), kernel_numbers(norm, batch)
    if numbers is None:
        return norm_by_moments(norm, kernels.moments(data), data.shape[1], batch)
    normed: Normed = kernels.normed_moments(data, numbers)
    return normed


def norm_by_moments(norm: BatchNormAct, moments: tuple[Tensor, Tensor], rows: int, batch: Batch) -> Normed:
    """A norm by the mean and variance of this replica's rows in each group, which go to the batch's statistics."""
    (mean, var), shared, replicas = moments, norm.shared, 1
    if shared is not None:
        assert len(mean) == 1, "a norm group across replicas is all that a pass has"
        replicas = shared.count
        mean, var = moments_over_replicas(norm, shared, batch, lambda: moments)
    slots = norm.columns(batch.statistics)
    constants = rows_for(norm.weight).forward_constants(
        mean, var, norm.weight, norm.bias, norm.epsilon, replicas * rows, slots, replicas
    )
    return Normed(mean, *constants)


def moments_over_replicas(
    norm: BatchNormAct, shared: SharedStatistics, batch: Batch, own: Callable[[], Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """The mean and variance of a norm group by those of each replica's images.

    In a pass that is computed again they are those of the first time, so that nothing is exchanged twice.
    """
    if batch.moments is not None and norm.index in batch.moments:
        mean, var = batch.moments[norm.index]
        return mean.detach(), var.detach()  # autograd takes no tensor as the output of two operations
    means, variances = shared.all_gather(torch.stack([*own()])).unbind(1)
    mean = means.mean(0)
    var = variances.mean(0) + (means - mean).square().mean(0)
    if batch.moments is not None:
        batch.moments[norm.index] = mean, var
    return mean, var


def norm_gradient_by_sums(
    normed: Normed, weight: Tensor, sums: Tensor, products: Tensor, rows: int, shared: SharedStatistics | None
) -> NormGradient:
    """The gradients of a norm by the sums of d and of d x over this replica's rows in each group."""
    constants = rows_for(weight).backward_constants
    a, b, c, d_weight, d_bias = constants(sums, products, normed.mean, normed.inverse, weight, rows)
    if shared is None:
        return NormGradient(a, b, c, d_weight, d_bias)
    # Weight and bias have this replica's own gradients, the images those of the whole group.
    sums, products = shared.all_reduce(torch.stack([sums, products]))
    a, b, c, _, _ = constants(sums, products, normed.mean, normed.inverse, weight, rows * shared.count)
    return NormGradient(a, b, c, d_weight, d_bias)
