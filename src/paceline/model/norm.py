"""Normalization, optional shortcut and activation as one call; batch statistics belong to the recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import keyed
from paceline.model.batch import Batch, Layer
from paceline.model.kernels.folded import FoldedNorm, folded_norm_act
from paceline.model.kernels.group_norm import GroupRule, fused_scale_shift
from paceline.model.kernels.norm import BatchRule, fused_norm_act, moments_over_replicas
from paceline.settings.model import Activation

ACTIVATIONS: dict[Activation | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu_,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
"""How each activation is computed on a tensor that nobody else reads."""

QUANTILES = 200
"""How many numbers stand for the Gaussian of proxy norm."""

Role = str
"""What a norm does in its unit: 'plain', 'branch' (ends the residual branch), 'projected-branch' (the same, in a unit
with a projection) or 'projection'."""


class SharedStatistics(Protocol):
    """The replicas that share norm groups with this one."""

    count: int

    def all_gather(self, values: Tensor) -> Tensor:
        """Everybody's values, stacked in replica order."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of everybody's values."""


class NormAct(Layer):
    """norm_act(x, batch, shortcut, mask): normalize, mask for stochastic depth, add the shortcut, activate.

    This one only scales and shifts (norm: none).
    """

    fused: bool = False
    """Whether a training pass takes the fused form, where there is one."""

    def __init__(self, channels: int, activation: Activation | None = "relu", role: Role = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.activation, self.role = activation, role

    def normalize(self, x: Tensor, batch: Batch | None) -> Tensor:  # noqa: ARG002 - batch norms need it
        """The normalized images, in memory of their own."""
        return torch.addcmul(self.bias.to(x.dtype)[:, None, None], x, self.weight.to(x.dtype)[:, None, None])

    def forward(
        self, x: Tensor, batch: Batch | None, shortcut: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        y = self.normalize(x, batch)
        if mask is not None:
            y = y.mul_(mask.to(y.dtype).view(-1, 1, 1, 1))
        if shortcut is not None:
            y = y.add_(shortcut)
        return ACTIVATIONS[self.activation](y)


class GroupNormAct(NormAct):
    """Normalization over groups of channels of each image."""

    def __init__(
        self, channels: int, groups: int, epsilon: float, activation: Activation | None = "relu", role: Role = "plain"
    ) -> None:
        super().__init__(channels, activation, role)
        self.groups = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        self.epsilon = epsilon

    def forward(
        self, x: Tensor, batch: Batch | None, shortcut: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self._takes_fused:
            return fused_norm_act(self, GroupRule(self), x, shortcut, mask)
        return super().forward(x, batch, shortcut, mask)

    @property
    def _takes_fused(self) -> bool:
        return self.fused and not torch.compiler.is_compiling()

    def normalize(self, x: Tensor, batch: Batch | None) -> Tensor:  # noqa: ARG002 - each image is its own
        return F.group_norm(x, self.groups, self.weight, self.bias, self.epsilon)


class ProxyNormAct(GroupNormAct):
    """Group norm whose activation's output is shifted and scaled as if a Gaussian had gone in.

    The Gaussian, 200 quantiles of equal weight with a learned scale and shift of its own, goes through the same scale,
    shift and activation as the images, which are then normalized by its mean and variance behind the activation. A norm
    without activation only scales: what follows it has a shift of its own.
    """

    quantiles: Tensor

    def __init__(
        self, channels: int, groups: int, epsilon: float, proxy_epsilon: float,
        activation: Activation | None = "relu", role: Role = "plain",
    ) -> None:  # fmt: skip
        super().__init__(channels, groups, epsilon, activation, role)
        self.proxy_epsilon = proxy_epsilon
        if activation is None:
            self.register_parameter("bias", None)
            return
        self.proxy_weight = nn.Parameter(torch.zeros(channels))
        self.proxy_bias = nn.Parameter(torch.zeros(channels))
        quantiles = torch.tensor(keyed.normal_quantiles(QUANTILES), dtype=torch.get_default_dtype())
        self.register_buffer("quantiles", quantiles, persistent=False)

    def forward(
        self, x: Tensor, batch: Batch | None, shortcut: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.activation is None:
            return super().forward(x, batch, shortcut, mask)
        assert shortcut is mask is None, "proxy norm stands directly before its activation"
        activate = ACTIVATIONS[self.activation]
        proxy = self.quantiles[:, None] * (1 + self.proxy_weight) + self.proxy_bias
        var, mean = torch.var_mean(activate(proxy * self.weight + self.bias), dim=0, correction=0)
        inverse = torch.rsqrt(var + self.proxy_epsilon)
        if self._takes_fused:
            # In 16 bits the gradients would lose what both steps leave of them, so this is wide, as under autocast.
            y = super().forward(x.to(torch.promote_types(x.dtype, torch.float32)), batch)
            return fused_scale_shift(y, inverse, -mean * inverse)
        y = activate(self.normalize(x, batch))
        return (y - _per_channel(mean).to(y.dtype)) * _per_channel(inverse).to(y.dtype)


class BatchNormAct(NormAct):
    """Normalization over the images of a norm group: neighbors in a micro-batch, or across neighboring replicas.

    Running statistics do not move in a forward pass. Each norm group of a pass writes its mean and unbiased variance
    to its columns of the batch's statistics, and to the same ones when it is computed again; `Statistics` moves the
    running statistics once per optimizer step, whatever the number of passes.
    """

    running_mean: Tensor
    running_var: Tensor
    index: int
    """Which of the batch norms in `Statistics` it is."""
    offset: int
    """The first of its columns in a row of statistics, means before variances."""
    folded: FoldedNorm | None = None
    """What it is during a pass of a `FoldedNetwork`."""

    def __init__(
        self,
        channels: int,
        momentum: float,
        epsilon: float,
        activation: Activation | None = "relu",
        role: Role = "plain",
    ) -> None:
        super().__init__(channels, activation, role)
        self.momentum, self.epsilon = momentum, epsilon
        self.shared: SharedStatistics | None = None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def columns(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """This norm's means and variances in rows of statistics."""
        channels = len(self.weight)
        middle = self.offset + channels
        return rows[:, self.offset : middle], rows[:, middle : middle + channels]

    def forward(
        self, x: Tensor, batch: Batch | None, shortcut: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.folded is not None and batch is None:
            return folded_norm_act(self.folded, x, shortcut)
        if self.fused and batch is not None and not torch.compiler.is_compiling():
            return fused_norm_act(self, BatchRule(self, batch), x, shortcut, mask)
        return super().forward(x, batch, shortcut, mask)

    def fold(self) -> FoldedNorm:
        """This norm in evaluation, by the running statistics of now; computed in float64."""
        scale = self.weight.double() * torch.rsqrt(self.running_var.double() + self.epsilon)
        shift = self.bias.double() - self.running_mean.double() * scale
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return FoldedNorm(scale.to(wide)[None], shift.to(wide)[None], self.activation)

    def normalize(self, x: Tensor, batch: Batch | None) -> Tensor:
        if batch is None:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.epsilon
            )
        if self.shared is not None:
            return self._across_replicas(x, batch, self.shared)
        if torch.compiler.is_compiling():
            return self._by_formula(x, *self.columns(batch.statistics))
        slots = batch.slots[self.index] if batch.slots else [*zip(*self.columns(batch.statistics), strict=True)]
        if len(slots) == 1:
            return self._by_kernel(x, *slots[0])
        groups = x.split(len(x) // len(slots))
        return torch.cat([self._by_kernel(group, *slot) for group, slot in zip(groups, slots, strict=True)])

    def _by_kernel(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        # With momentum 1, torch's own kernel leaves this group's mean and unbiased variance in the two tensors.
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.epsilon)

    def _by_formula(self, x: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """All groups at once, which a compiler fuses; one kernel for each would be one more copy to compile."""
        wide = x.unflatten(0, (len(means), -1)).to(self.weight.dtype)
        var, mean = torch.var_mean(wide, dim=(1, 3, 4), correction=0)
        count = wide.numel() // var.numel()
        means.copy_(mean.detach())
        variances.copy_((var * (count / max(1, count - 1))).detach())
        scale = self.weight * torch.rsqrt(var + self.epsilon)
        center, scale = (values[:, None, :, None, None] for values in (mean, scale))
        y: Tensor = (wide - center) * scale + _per_channel(self.bias)
        return y.flatten(0, 1).to(x.dtype)

    def _across_replicas(self, x: Tensor, batch: Batch, shared: SharedStatistics) -> Tensor:
        y, mean, var = _SharedNorm.apply(x, self.weight, self.bias, self, batch)  # type: ignore[no-untyped-call]
        means, variances = self.columns(batch.statistics)
        means[0].copy_(mean / shared.count)  # each replica writes its fraction of the one group
        variances[0].copy_(var / shared.count)
        assert isinstance(y, Tensor)
        return y


def norm_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters of norms, Paceline's and others'."""
    kinds = (NormAct, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
    norms = [(prefix, norm) for prefix, norm in module.named_modules() if isinstance(norm, kinds)]
    return {f"{prefix}.{name}" for prefix, norm in norms for name, _ in norm.named_parameters(recurse=False)}


class _SharedNorm(torch.autograd.Function):
    """Batch norm over the same layer's images on several replicas; gives the normalized images, mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNormAct, batch: Batch) -> Any:
        shared = norm.shared
        assert shared is not None
        wide = x.to(weight.dtype)
        mean, var = moments_over_replicas(
            norm, shared, batch, lambda: torch.var_mean(wide, dim=(0, 2, 3), correction=0)[::-1]
        )
        images = shared.count * x.numel() // x.shape[1]
        inverse = torch.rsqrt(var + norm.epsilon)
        scale = weight * inverse
        y = torch.addcmul(_per_channel(bias - mean * scale), wide, _per_channel(scale)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.shared, ctx.images = shared, images
        unbiased = var * (images / max(1, images - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return y, mean, unbiased

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = gradients[0].to(weight.dtype)
        normal = (x.to(weight.dtype) - _per_channel(mean)) * _per_channel(inverse)
        own = torch.stack([dy.sum((0, 2, 3)), (dy * normal).sum((0, 2, 3))])
        total = ctx.shared.all_reduce(own.clone()) / ctx.images
        dx = (dy - _per_channel(total[0]) - normal * _per_channel(total[1])) * _per_channel(weight * inverse)
        return dx.to(x.dtype), own[1], own[0], None, None


def _per_channel(values: Tensor) -> Tensor:
    """One value per channel, shaped to meet images."""
    return values[:, None, None]


class Statistics:
    """The statistics of all batch norms of a network: gathered over a step in one row, moved once.

    The norms' running statistics are views of one flat tensor, and the rows that norm groups write to are another, so
    that a step needs a handful of kernels, not a handful for each norm. A step has `passes` forward passes of `groups`
    norm groups each. Frozen norms are left alone.
    """

    def __init__(self, module: nn.Module, passes: int, groups: int, shared: SharedStatistics | None = None) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, BatchNormAct) and m.weight.requires_grad]
        offset = 0
        for index, norm in enumerate(self.norms):
            norm.index, norm.offset, norm.shared = index, offset, shared
            offset += 2 * len(norm.weight)
        pairs = [(norm, values) for norm in self.norms for values in (norm.running_mean, norm.running_var)]
        nothing = [next(module.parameters()).new_empty(0)]
        self._running = torch.cat([values for _, values in pairs] or nothing)
        # Each norm has a momentum of its own, for networks of other packages.
        self._momenta = torch.cat([torch.full_like(values, norm.momentum) for norm, values in pairs] or nothing)
        self._pending = self._running.new_zeros(passes * groups, offset)
        self._passes: tuple[Tensor, ...] = self._pending.split(groups)
        self._aside: tuple[Tensor, ...] = torch.zeros_like(self._pending).split(groups)
        self._widths = [len(values) for _, values in pairs]
        for norm in self.norms:
            (norm.running_mean,), (norm.running_var,) = norm.columns(self._running[None])

    def pass_rows(self, index: int) -> Tensor:
        """The rows that the norm groups of this forward pass of the step write to."""
        return self._passes[index]

    def slots(self, index: int) -> tuple[tuple[tuple[Tensor, Tensor], ...], ...]:
        """Views of these rows for each norm and norm group; one call cuts a row, not two calls for each norm."""
        rows = [row.split(self._widths) for row in self._passes[index].unbind()]
        return tuple(tuple((row[at], row[at + 1]) for row in rows) for at in range(0, len(self._widths), 2))

    def put_aside(self, index: int) -> None:
        """Keep what this pass has written to the rows of pass 1, which serve every pass but the first in turn."""
        self._aside[index].copy_(self._passes[1])

    def put_back(self, passes: int) -> None:
        """Let the rows of the later passes of a step be what was put aside."""
        for index in range(1, passes):
            self._passes[index].copy_(self._aside[index])

    def collect(self) -> Tensor:
        """This replica's sums over the norm groups of the step, in one row."""
        return self._pending[0] if len(self._pending) == 1 else self._pending.sum(0)

    @property
    def width(self) -> int:
        """How many numbers a row has: none where no norm keeps statistics."""
        return self._running.numel()

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Make these the running statistics."""
        self._running.copy_(values)

    @torch.no_grad()
    def pop(self) -> Tensor:
        """This replica's sums over the norm groups of the step, in memory of their own; the rows become empty."""
        sums = self._pending.sum(0)
        self._pending.zero_()
        return sums

    @torch.no_grad()
    def update(self, sums: Tensor, groups: int, bad: Tensor) -> None:
        """Move toward the mean over all groups of the step, unless the step is bad."""
        moved = torch.lerp(self._running, sums / groups, self._momenta)
        self._running.copy_(torch.where(bad > 0, self._running, moved))
        self._pending.zero_()
