"""Muon: momentum whose direction is orthogonalized, matrix by matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.optim.rule import StepView
from paceline.settings.optimizer import Muon

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Published coefficients of the polynomial that drives singular values toward 1: quickly, and into about 0.7 to 1.2."""
MIN_NORM = 1e-7
"""Matrices with a smaller norm are not scaled up to the others, but fade away."""


@dataclass(frozen=True)
class MuonRule:
    """m = momentum * m + g; w -= lr * (orthogonal(m) * sqrt(max(1, rows / columns)) + decay * w), or with Nesterov
    orthogonal(g + momentum * m); a convolution is a matrix of its outputs by everything else."""

    settings: Muon
    needs_step_count = False
    initial_state: ClassVar = {"momentum": 0.0}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self.settings
        buffer = view.gradient.add(view.state["momentum"], alpha=settings.momentum)
        momentum = view.gradient.add(buffer, alpha=settings.momentum) if settings.nesterov else buffer
        direction = torch.zeros_like(momentum)
        # The columns of a flat tensor's matrices have another order than a parameter's; the numbers are the same.
        for target, matrices in zip(view.flat.matrices(direction), view.flat.matrices(momentum), strict=True):
            rows, columns = matrices.shape[1:]
            target.copy_(orthogonalize(matrices, settings.iterations) * max(1.0, rows / columns) ** 0.5)
        if view.decay:
            direction.add_(view.weights, alpha=view.decay)
        return view.descend(direction), {"momentum": buffer}


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1, by Newton-Schulz iterations."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=MIN_NORM)
    linear, cubic, quintic = QUINTIC
    for _ in range(iterations):
        square = x @ x.mT
        inner = torch.baddbmm(square, square, square, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, inner, x, beta=linear)
    return x.mT if tall else x
