"""Normalization, optional shortcut and activation as one call; batch statistics belong to the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import keyed
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


class Neighbors(Protocol):
    """The replicas that share a norm group with this one."""

    count: int

    def all_gather(self, values: Tensor) -> Tensor:
        """Everybody's values, stacked in replica order."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of everybody's values."""
        ...


class NormAct(nn.Module):
    """norm_act(x, shortcut): normalize, add the shortcut, activate. This one only scales and shifts (norm: none)."""

    def __init__(self, channels: int, activation: Activation | None = "relu", role: Role = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.activation, self.role = activation, role

    def normalize(self, x: Tensor) -> Tensor:
        """The normalized images, in memory of their own."""
        return torch.addcmul(self.bias.to(x.dtype)[:, None, None], x, self.weight.to(x.dtype)[:, None, None])

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = self.normalize(x)
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

    def normalize(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.epsilon)


class ProxyNormAct(GroupNormAct):
    """Group norm whose activation's output is shifted and scaled as if a Gaussian had gone in.

    The Gaussian, 200 quantiles of equal weight with a learned scale and shift of its own, goes through the same scale,
    shift and activation as the images; its mean and spread behind the activation are taken off the images. A norm
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

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if self.activation is None:
            return super().forward(x, shortcut)
        assert shortcut is None, "proxy norm stands directly before its activation"
        activate = ACTIVATIONS[self.activation]
        proxy = self.quantiles[:, None] * (1 + self.proxy_weight) + self.proxy_bias
        var, mean = torch.var_mean(activate(proxy * self.weight + self.bias), dim=0, correction=0)
        inverse = torch.rsqrt(var + self.proxy_epsilon)
        y = activate(self.normalize(x))
        return (y - _wide(mean).to(y.dtype)) * _wide(inverse).to(y.dtype)


class BatchNormAct(NormAct):
    """Normalization over `images` images of each channel: neighbors in a micro-batch, or across neighboring replicas.

    Running statistics do not move in a forward pass. Each norm group of the pass leaves its mean and unbiased variance
    in its rows of the two `places`, and in the same ones when it is computed again; `Statistics` moves the running
    statistics once per optimizer step, whatever the number of passes.
    """

    running_mean: Tensor
    running_var: Tensor

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
        self.images = 0
        self.neighbors: Neighbors | None = None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.places = (torch.empty(0, channels), torch.empty(0, channels))

    def normalize(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.epsilon
            )
        if self.neighbors is not None:
            return self._across_replicas(x, self.neighbors)
        if torch.compiler.is_compiling():
            return self._by_formula(x)
        groups = [x] if self.images == len(x) else x.split(self.images)
        made = [self._by_kernel(group, *place) for group, place in zip(groups, self._rows(), strict=True)]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _by_kernel(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        # With momentum 1, torch's own kernel leaves this group's mean and unbiased variance in the two tensors.
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.epsilon)

    def _by_formula(self, x: Tensor) -> Tensor:
        """All groups at once, which a compiler fuses; one kernel for each would be one more copy to compile."""
        wide = x.unflatten(0, (-1, self.images)).to(self.weight.dtype)
        var, mean = torch.var_mean(wide, dim=(1, 3, 4), correction=0)
        count = wide.numel() // var.numel()
        for place, value in zip(self.places, (mean, var * (count / max(1, count - 1))), strict=True):
            place.copy_(value.detach())
        scale = self.weight * torch.rsqrt(var + self.epsilon)
        around, scale = (values[:, None, :, None, None] for values in (mean, scale))
        y: Tensor = (wide - around) * scale + _wide(self.bias)
        return y.flatten(0, 1).to(x.dtype)

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*self.places, strict=True)

    def _across_replicas(self, x: Tensor, neighbors: Neighbors) -> Tensor:
        y, seen = _SharedNorm.apply(x, self.weight, self.bias, self.epsilon, neighbors)  # type: ignore[no-untyped-call]
        for place, value in zip(self.places, seen / neighbors.count, strict=True):
            place[0].copy_(value)  # each neighbor leaves its part of the one group
        assert isinstance(y, Tensor)
        return y


def norm_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters of norms, Paceline's and others'."""
    kinds = (NormAct, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
    norms = [(start, part) for start, part in module.named_modules() if isinstance(part, kinds)]
    return {f"{start}.{name}" for start, part in norms for name, _ in part.named_parameters(recurse=False)}


class _SharedNorm(torch.autograd.Function):
    """Batch norm over the same layer's images on several replicas; gives the normalized images and [mean, variance]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, neighbors: Neighbors) -> Any:
        wide = x.to(weight.dtype)
        var, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        everyone = neighbors.all_gather(torch.stack([mean, var]))
        means, variances = everyone[:, 0], everyone[:, 1]
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        images = neighbors.count * x.numel() // x.shape[1]
        inverse = torch.rsqrt(var + epsilon)
        scale = weight * inverse
        y = torch.addcmul(_wide(bias - mean * scale), wide, _wide(scale)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.neighbors, ctx.images = neighbors, images
        seen = torch.stack([mean, var * (images / max(1, images - 1))])
        ctx.mark_non_differentiable(seen)
        return y, seen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = gradients[0].to(weight.dtype)
        normal = (x.to(weight.dtype) - _wide(mean)) * _wide(inverse)
        own = torch.stack([dy.sum((0, 2, 3)), (dy * normal).sum((0, 2, 3))])
        total = ctx.neighbors.all_reduce(own.clone()) / ctx.images
        dx = (dy - _wide(total[0]) - normal * _wide(total[1])) * _wide(weight * inverse)
        return dx.to(x.dtype), own[1], own[0], None, None


def _wide(values: Tensor) -> Tensor:
    """One value per channel, shaped to meet images."""
    return values[:, None, None]


class Statistics:
    """The statistics of all batch norms of a network: gathered over a step in one row, moved once.

    The norms' running statistics and the places their groups write to are views of two flat tensors, so that a step
    needs a handful of kernels, not a handful for each norm. A step has `passes` forward passes of `groups` norm groups
    each. Norms that stand still are left alone.
    """

    def __init__(self, module: nn.Module, passes: int, groups: int) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, BatchNormAct) and m.weight.requires_grad]
        if not self.norms:
            return
        running = [t for m in self.norms for t in (m.running_mean, m.running_var)]
        sizes = [len(t) for t in running]
        self._running = torch.cat(running)
        # Each norm has a momentum of its own, for networks of other packages.
        momenta = [torch.full_like(t, m.momentum) for m in self.norms for t in (m.running_mean, m.running_var)]
        self._momentum = torch.cat(momenta)
        self._pending = self._running.new_zeros(passes * groups, sum(sizes))
        views = self._running.split(sizes)
        for norm, mean, var in zip(self.norms, views[::2], views[1::2], strict=True):
            norm.running_mean, norm.running_var = mean, var
        turns = [rows.split(sizes, 1) for rows in self._pending.split(groups)]
        self._places = [list(zip(columns[::2], columns[1::2], strict=True)) for columns in turns]
        self.turn(0)

    def turn(self, number: int) -> None:
        """Let the norms write to the places of this forward pass of the step."""
        if self.norms:
            for norm, places in zip(self.norms, self._places[number], strict=True):
                norm.places = places

    def collect(self) -> Tensor | None:
        """This replica's sums over the norm groups of the step, in one row; None where no norm keeps any."""
        if not self.norms:
            return None
        return self._pending[0] if len(self._pending) == 1 else self._pending.sum(0)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self._running.numel() if self.norms else 0

    @torch.no_grad()
    def put(self, values: Tensor) -> None:
        """Make these the running statistics."""
        if self.norms:
            self._running.copy_(values)

    @torch.no_grad()
    def take_away(self) -> Tensor:
        """What `collect` gives, in memory of its own, and the places are empty for the next step."""
        sums = self._pending.sum(0)
        self._pending.zero_()
        return sums

    @torch.no_grad()
    def settle(self, sums: Tensor | None, groups: int, bad: Tensor) -> None:
        """Move toward the mean over all groups of the step, unless the step is bad."""
        if sums is None:
            return
        moved = torch.lerp(self._running, sums / groups, self._momentum)
        self._running.copy_(torch.where(bad > 0, self._running, moved))
        self._pending.zero_()
