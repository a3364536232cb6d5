"""RMSProp, in TensorFlow's form and in torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.rule import Moment
from paceline.settings.optimizer import RmsProp


@dataclass(frozen=True)
class RmsPropRule:
    """Both forms keep r = decay * r + (1 - decay) * g**2, where g has weight decay added to it.

    tensorflow: r starts at 1; m = momentum * m + lr * g / sqrt(r + epsilon); w -= m.
    torch: r starts at 0; m = momentum * m + g / (sqrt(r) + epsilon); w -= lr * m.
    """

    settings: RmsProp
    counts = False

    @property
    def starts(self) -> dict[str, float]:
        return {"square": 1.0 if self.settings.form == "tensorflow" else 0.0, "momentum": 0.0}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        settings, gradient = self.settings, now.decayed
        square = (now.state["square"] * settings.decay).addcmul_(gradient, gradient, value=1 - settings.decay)
        square.clamp_(max=torch.finfo(square.dtype).max)  # infinite, after one huge gradient, it would stay so
        kept = now.state["momentum"] * settings.momentum
        if settings.form == "tensorflow":
            kept.addcdiv_(gradient * now.lr, (square + settings.epsilon).sqrt_())
            weights = now.weights - kept
        else:
            kept.addcdiv_(gradient, square.sqrt().add_(settings.epsilon))
            weights = torch.addcmul(now.weights, kept, now.lr, value=-1)
        return weights, {"square": square, "momentum": kept}
