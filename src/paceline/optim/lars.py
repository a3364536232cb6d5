"""LARS and LARC: learning rates tensor by tensor, from the ratio of the norms of weights and gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.optim.rule import StepView
from paceline.optim.sgd import sgd_update
from paceline.settings.optimizer import Larc, Lars


def trust_ratio(
    weight_norms: Tensor, step_norms: Tensor, coefficient: float, decay: float = 0.0, epsilon: float = 0.0
) -> Tensor:
    """coefficient * |w| / (|step| + decay * |w| + epsilon) for each pair of norms, and 1 where one of them is zero."""
    ratio = coefficient * weight_norms / (step_norms + decay * weight_norms + epsilon)
    return torch.where((weight_norms > 0) & (step_norms > 0), ratio, 1.0)


@dataclass(frozen=True)
class LarsRule:
    """m = momentum * m + lr * ratio * (g + decay * w); w -= m, with the learning rate inside the momentum as in the
    MLPerf reference; with `momentum_correction`, m = momentum * m + ratio * (g + decay * w); w -= lr * m.

    Weight decay is added to g before its norm is taken. Parameters that LARS skips have ratio 1 and no LARS decay.
    """

    settings: Lars
    skipped: bool
    needs_step_count = False
    initial_state: ClassVar = {"momentum": 0.0}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        settings, direction = self.settings, self._direction(view)
        if settings.momentum_correction:
            return sgd_update(view, direction, settings.momentum, nesterov=False)
        buffer = (view.state["momentum"] * settings.momentum).addcmul_(direction, view.lr)
        return view.weights - buffer, {"momentum": buffer}

    def _direction(self, view: StepView) -> Tensor:
        settings, gradient, norms = self.settings, view.decayed_gradient, view.flat.norms
        if self.skipped:
            return gradient
        weight_norms, gradient_norms = norms(view.weights), norms(gradient)
        ratio = trust_ratio(weight_norms, gradient_norms, settings.trust_coefficient, settings.decay, settings.epsilon)
        return view.flat.multiply(gradient.add(view.weights, alpha=settings.decay), ratio)


@dataclass(frozen=True)
class LarcRule:
    """Momentum over gradients times min(ratio / lr, 1), or times the ratio; g includes weight decay throughout."""

    settings: Larc
    needs_step_count = False
    initial_state: ClassVar = {"momentum": 0.0}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        settings, gradient, norms = self.settings, view.decayed_gradient, view.flat.norms
        factor = trust_ratio(norms(view.weights), norms(gradient), settings.trust_coefficient)
        if settings.mode == "clip":
            factor = (factor / view.lr).clamp_(max=1)  # a rate of zero gives infinity, and so 1
        return sgd_update(view, view.flat.multiply(gradient, factor), settings.momentum, settings.nesterov)
