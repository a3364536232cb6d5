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

    Running statistics do not move in a forward pass. Each norm group adds its mean and unbiased variance to `pending`;
    `settle` moves the running statistics once per optimiser step, whatever the number of passes.
    """

    running_mean: Tensor
    running_var: Tensor
    pending: Tensor

    def __init__(
        self, channels: int, momentum: float, epsilon: float, activate: bool = True, role: Role = "plain"
    ) -> None:
        super().__init__(channels, activate, role)
        self.momentum, self.epsilon = momentum, epsilon
        self.images = 0
        self.neighbours: Neighbours | None = None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("pending", torch.zeros(2, channels), persistent=False)

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
        # With momentum 1, torch's own kernel leaves this group's mean and unbiased variance in the two rows.
        seen = torch.zeros_like(self.pending)
        y = F.batch_norm(x, seen[0], seen[1], self.weight, self.bias, True, 1.0, self.epsilon)
        self.pending.add_(seen)
        return y

    def _across_replicas(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        y, seen = _SharedNorm.apply(x, self.weight, self.bias, self.epsilon, neighbours)  # type: ignore[no-untyped-call]
        self.pending.add_(seen / neighbours.count)  # each neighbour adds its part of the one group
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
    """The running statistics of all batch norms of a network: collected over a step, moved once."""

    def __init__(self, module: nn.Module) -> None:
        self.norms = [m for m in module.modules() if isinstance(m, BatchNormAct)]
        self.sizes = [2 * len(m.weight) for m in self.norms]

    def collect(self) -> Tensor | None:
        """This replica's sums over the norm groups of the step, in one row; None where no norm keeps any."""
        if not self.norms:
            return None
        return torch.cat([m.pending.flatten() for m in self.norms])

    @torch.no_grad()
    def settle(self, sums: Tensor | None, groups: int, finite: Tensor) -> None:
        """Move towards the mean over all groups of the step, where the step is finite."""
        if sums is None:
            return
        running = [t for m in self.norms for t in (m.running_mean, m.running_var)]
        old = torch.cat(running)
        new = torch.where(finite, torch.lerp(old, sums / groups, self.norms[0].momentum), old)
        torch._foreach_copy_(running, new.split([len(t) for t in running]))
        torch._foreach_zero_([m.pending for m in self.norms])
