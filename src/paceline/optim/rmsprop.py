"""RMSProp, in TensorFlow's form and in torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.rule import StepView
from paceline.settings.optimizer import RmsProp


@dataclass(frozen=True)
class RmsPropRule:
    """Both forms have r = decay * r + (1 - decay) * g**2, where g includes weight decay.

    tensorflow: r starts at 1; m = momentum * m + lr * g / sqrt(r + epsilon); w -= m.
    torch: r starts at 0; m = momentum * m + g / (sqrt(r) + epsilon); w -= lr * m.
    """

    settings: RmsProp
    needs_step_count = False

    @property
    def initial_state(self) -> dict[str, float]:
        return {"square": 1.0 if self.settings.form == "tensorflow" else 0.0, "momentum": 0.0}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        settings, gradient = self.settings, view.decayed_gradient
        square = (view.state["square"] * settings.decay).addcmul_(gradient, gradient, value=1 - settings.decay)
        square.clamp_(max=torch.finfo(square.dtype).max)  # once infinite, after a huge gradient, it would stay so
        buffer = view.state["momentum"] * settings.momentum
        if settings.form == "tensorflow":
            buffer.addcdiv_(gradient * view.lr, (square + settings.epsilon).sqrt_())
            weights = view.weights - buffer
        else:
            buffer.addcdiv_(gradient, square.sqrt().add_(settings.epsilon))
            weights = view.descend(buffer)
        return weights, {"square": square, "momentum": buffer}
