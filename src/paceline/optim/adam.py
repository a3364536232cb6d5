"""AdamW, and LAMB, which scales AdamW's step tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.lars import trusted
from paceline.optim.rule import Moment


@dataclass(frozen=True)
class AdamRule:
    """m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2, each divided by 1 - b**steps for its start at zero;
    w -= lr * u with u = m / (sqrt(v) + epsilon) + decay * w.

    LAMB multiplies u by |w| / |u| of each tensor, and by 1 where one of the norms is zero.
    """

    betas: tuple[float, float]
    epsilon: float
    scaled: bool = False
    """Whether this is LAMB's step."""
    counts = True

    @property
    def starts(self) -> dict[str, float]:
        return {"mean": 0.0, "square": 0.0}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = self.betas
        mean = now.state["mean"].lerp(now.gradient, 1 - first)
        square = (now.state["square"] * second).addcmul_(now.gradient, now.gradient, value=1 - second)
        root = (square / _begun(second, now.steps)).sqrt_().add_(self.epsilon)
        step = (mean / _begun(first, now.steps)).div_(root)
        if now.decay:
            step.add_(now.weights, alpha=now.decay)
        if self.scaled:
            norms = now.slab.norms
            step = now.slab.times(step, trusted(norms(now.weights), norms(step), trust=1.0))
        return torch.addcmul(now.weights, step, now.lr, value=-1), {"mean": mean, "square": square}


def _begun(beta: float, steps: Tensor) -> Tensor:
    """1 - beta**steps, without the loss of digits that the subtraction would bring in float32."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))
