"""Muon: momentum whose direction is made orthogonal, matrix by matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.rule import Moment
from paceline.settings.optimizer import Muon

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Published coefficients of the polynomial that drives singular values toward 1: into about 0.7 to 1.2, soon."""
FAINTEST = 1e-7
"""A direction with a smaller norm is not made as large as the others, but fades away."""


@dataclass(frozen=True)
class MuonRule:
    """m = momentum * m + g; w -= lr * (orthogonal(m) * sqrt(max(1, rows / columns)) + decay * w), or with Nesterov
    orthogonal(g + momentum * m); a convolution is the matrix of its outputs by all else."""

    settings: Muon
    counts = False

    @property
    def starts(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self.settings
        kept = now.gradient.add(now.state["momentum"], alpha=settings.momentum)
        direction = now.gradient.add(kept, alpha=settings.momentum) if settings.nesterov else kept
        step = torch.zeros_like(direction)
        # The columns of a slab's matrices are in another order than a parameter's, which does not change the numbers.
        for made, stack in zip(now.slab.stacks(step), now.slab.stacks(direction), strict=True):
            rows, columns = stack.shape[1:]
            made.copy_(orthogonal(stack, settings.iterations) * max(1.0, rows / columns) ** 0.5)
        if now.decay:
            step.add_(now.weights, alpha=now.decay)
        return torch.addcmul(now.weights, step, now.lr, value=-1), {"momentum": kept}


def orthogonal(stack: Tensor, iterations: int) -> Tensor:
    """Matrices with the same singular vectors, and singular values near 1, by Newton-Schulz iterations."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=FAINTEST)
    linear, cubic, quintic = QUINTIC
    for _ in range(iterations):
        square = x @ x.mT
        inner = torch.baddbmm(square, square, square, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, inner, x, beta=linear)
    return x.mT if tall else x
