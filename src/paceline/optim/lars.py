"""LARS and LARC: learning rates tensor by tensor, by the ratio of the norms of weights and gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.rule import Moment
from paceline.optim.sgd import descend
from paceline.settings.optimizer import Larc, Lars


def trusted(weights: Tensor, steps: Tensor, trust: float, pull: float = 0.0, epsilon: float = 0.0) -> Tensor:
    """trust * |w| / (|step| + pull * |w| + epsilon) for each pair of norms, and 1 where one of them is zero."""
    ratio = trust * weights / (steps + pull * weights + epsilon)
    return torch.where((weights > 0) & (steps > 0), ratio, 1.0)


@dataclass(frozen=True)
class LarsRule:
    """m = momentum * m + lr * ratio * (g + decay * w); w -= m, the learning rate inside the momentum as in the MLPerf
    reference; with `momentum_correction`, m = momentum * m + ratio * (g + decay * w); w -= lr * m.

    g has weight decay added to it before its norm is taken. Parameters that LARS skips have ratio 1 and no LARS decay.
    """

    settings: Lars
    skipped: bool
    counts = False

    @property
    def starts(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        settings, direction = self.settings, self._direction(now)
        if settings.momentum_correction:
            return descend(now, direction, settings.momentum, nesterov=False)
        kept = (now.state["momentum"] * settings.momentum).addcmul_(direction, now.lr)
        return now.weights - kept, {"momentum": kept}

    def _direction(self, now: Moment) -> Tensor:
        settings, gradient, norms = self.settings, now.decayed, now.slab.norms
        if self.skipped:
            return gradient
        ratio = trusted(
            norms(now.weights), norms(gradient), settings.trust_coefficient, settings.decay, settings.epsilon
        )
        return now.slab.times(gradient.add(now.weights, alpha=settings.decay), ratio)


@dataclass(frozen=True)
class LarcRule:
    """Momentum over gradients times min(ratio / lr, 1), or times the ratio; decay is in the gradient before."""

    settings: Larc
    counts = False

    @property
    def starts(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        settings, gradient = self.settings, now.decayed
        factor = trusted(now.slab.norms(now.weights), now.slab.norms(gradient), settings.trust_coefficient)
        if settings.mode == "clip":
            factor = (factor / now.lr).clamp_(max=1)  # a rate of zero gives infinity, and so 1
        return descend(now, now.slab.times(gradient, factor), settings.momentum, settings.nesterov)
