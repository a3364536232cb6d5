"""AdamW, and LAMB, which scales AdamW's step tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.optim.lars import trust_ratio
from paceline.optim.rule import StepView


@dataclass(frozen=True)
class AdamRule:
    """m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2, both divided by 1 - b**good_steps;
    w -= lr * u with u = m / (sqrt(v) + epsilon) + decay * w.

    LAMB multiplies u by |w| / |u| of each tensor, or by 1 where one of the norms is zero.
    """

    betas: tuple[float, float]
    epsilon: float
    lamb: bool = False
    needs_step_count = True
    initial_state: ClassVar = {"mean": 0.0, "square": 0.0}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = self.betas
        mean = view.state["mean"].lerp(view.gradient, 1 - first)
        square = (view.state["square"] * second).addcmul_(view.gradient, view.gradient, value=1 - second)
        root = (square / bias_correction(second, view.good_steps)).sqrt_().add_(self.epsilon)
        direction = (mean / bias_correction(first, view.good_steps)).div_(root)
        if view.decay:
            direction.add_(view.weights, alpha=view.decay)
        if self.lamb:
            norms = view.flat.norms
            ratio = trust_ratio(norms(view.weights), norms(direction), coefficient=1.0)
            direction = view.flat.multiply(direction, ratio)
        return view.descend(direction), {"mean": mean, "square": square}


def bias_correction(beta: float, good_steps: Tensor) -> Tensor:
    """1 - beta**good_steps, without the digits that the subtraction would lose in float32."""
    return -torch.expm1(good_steps * (math.log(beta) if beta else -math.inf))
