"""Normalisation, optional shortcut and activation as one call; batch statistics belong to the recipe."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Role = str
"""What a norm does in its unit: 'plain', 'branch' (ends the residual branch), 'projected-branch' (the same, in a unit
with a projection) or 'projection'."""


class Neighbours(Protocol):
    """The replicas that share a norm group with this one."""

    count: int

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's values, stacked in replica order."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of everybody's values."""
        ...


class NormAct(nn.Module):
    """norm_act(x, shortcut): normalise, add the shortcut, activate. This one only scales and shifts (norm: none)."""

    def __init__(self, channels: int, activate: bool = True, role: Role = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.activate, self.role = activate, role

    def normalise(self, x: Tensor) -> Tensor:
        """The normalised images, in memory of their own."""
        return torch.addcmul(self.bias.to(x.dtype)[:, None, None], x, self.weight.to(x.dtype)[:, None, None])

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = self.normalise(x)
        if shortcut is not None:
            y = y.add_(shortcut)
        return F.relu_(y) if self.activate else y


class GroupNormAct(NormAct):
    """Normalisation over groups of channels of each image."""

    def __init__(self, channels: int, groups: int, epsilon: float, activate: bool = True, role: Role = "plain") -> None:
        super().__init__(channels, activate, role)
        self.groups = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        self.epsilon = epsilon

    def normalise(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.epsilon)


class BatchNormAct(NormAct):
    """Normalisation over `images` images of each channel: neighbours in a micro-batch, or across neighbouring replicas.

    Running statistics do not move in a forward pass. Each norm group leaves its mean and unbiased variance in
    `pending`; `Statistics` moves the running statistics once per optimiser step, whatever the number of passes.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, momentum: float, epsilon: float, activate: bool = True, role: Role = "plain"
    ) -> None:
        super().__init__(channels, activate, role)
        self.momentum, self.epsilon = momentum, epsilon
        self.images = 0
        self.neighbours: Neighbours | None = None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.used = 0

    def normalise(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.epsilon
            )
        if self.neighbours is not None:
            return self._across_replicas(x, self.neighbours)
        if self.images == len(x):
            return self._one_group(x)
        return torch.cat([self._one_group(group) for group in x.split(self.images)])

    def _one_group(self, x: Tensor) -> Tensor:
        # With momentum 1, torch's own kernel leaves this group's mean and unbiased variance in the two tensors.
        if torch.compiler.is_compiling():  # one graph for every pass: add to the first place instead of counting places
            mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
            y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.epsilon)
            self.pending[0][0].add_(mean)
            self.pending[0][1].add_(var)
            return y
        mean, var = self.pending[self.used]
        self.used += 1
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.epsilon)

    def _across_replicas(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        y, seen = _SharedNorm.apply(x, self.weight, self.bias, self.epsilon, neighbours)  # type: ignore[no-untyped-call]
        mean, var = seen / neighbours.count  # each neighbour leaves its part of the one group
        self.pending[0][0].add_(mean)
        self.pending[0][1].add_(var)
        assert isinstance(y, Tensor)
        return y


class _SharedNorm(torch.autograd.Function):
    """Batch norm over the same layer's images on several replicas; gives the normalised images and [mean, variance]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, neighbours: Neighbours) -> Any:
        wide = x.to(weight.dtype)
        var, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        everyone = neighbours.gather(torch.stack([mean, var]))
        means, variances = everyone[:, 0], everyone[:, 1]
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        images = neighbours.count * x.numel() // x.shape[1]
        inverse = torch.rsqrt(var + epsilon)
        scale = weight * inverse
        y = torch.addcmul(_wide(bias - mean * scale), wide, _wide(scale)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.neighbours, ctx.images = neighbours, images
        seen = torch.stack([mean, var * (images / max(1, images - 1))])
        ctx.mark_non_differentiable(seen)
        return y, seen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = gradients[0].to(weight.dtype)
        normal = (x.to(weight.dtype) - _wide(mean)) * _wide(inverse)
        own = torch.stack([dy.sum((0, 2, 3)), (dy * normal).sum((0, 2, 3))])
        total = ctx.neighbours.sum(own.clone()) / ctx.images
        dx = (dy - _wide(total[0]) - normal * _wide(total[1])) * _wide(weight * inverse)
        return dx.to(x.dtype), own[1], own[0], None, None


def _wide(values: Tensor) -> Tensor:
    """One value per channel, shaped to meet images."""
    return values[:, None, None]


class Statistics:
    """The statistics of all batch norms of a network: gathered over a step in one row, moved once.

    The norms' running statistics and the places their groups write to are views of two flat tensors, so that a step
    needs a handful of kernels, not a handful for each norm. `passes` is how many groups a norm sees in one step.
    """

    def __init__(self, module: nn.Module, passes: int) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, BatchNormAct)]
        if not self.norms:
            return
        running = [t for m in self.norms for t in (m.running_mean, m.running_var)]
        sizes = [len(t) for t in running]
        self._running = torch.cat(running)
        self._pending = self._running.new_zeros(passes, sum(sizes))
        views, places = self._running.split(sizes), [row.split(sizes) for row in self._pending]
        for number, norm in enumerate(self.norms):
            here = slice(2 * number, 2 * number + 2)
            norm.running_mean, norm.running_var = views[here]
            norm.pending = [tuple(row[here]) for row in places]

    def collect(self) -> Tensor | None:
        """This replica's sums over the norm groups of the step, in one row; None where no norm keeps any."""
        if not self.norms:
            return None
        for norm in self.norms:
            norm.used = 0
        return self._pending[0] if len(self._pending) == 1 else self._pending.sum(0)

    @torch.no_grad()
    def settle(self, sums: Tensor | None, groups: int, bad: Tensor) -> None:
        """Move towards the mean over all groups of the step, unless the step is bad."""
        if sums is None:
            return
        moved = torch.lerp(self._running, sums / groups, self.norms[0].momentum)
        self._running.copy_(torch.where(bad > 0, self._running, moved))
        self._pending.zero_()
