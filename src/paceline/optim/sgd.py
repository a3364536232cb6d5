"""Gradient descent with or without momentum: by torch's fused kernel, or as a rule where gradients are clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.flat import Group
from paceline.optim.rule import Moment


class Descent:
    """m = momentum * m + (g + decay * w); w -= lr * m, or with Nesterov w -= lr * (g + decay * w + momentum * m).

    Gradients are sums over images; the division by their number and the decision to skip a step that is not finite
    happen in the kernel, so the host never waits.
    """

    def __init__(self, groups: list[Group], momentum: float, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._buffers: dict[str, Tensor] = {}
        self._groups = groups
        if momentum:
            named = {name: p for group in groups for name, p in group.parameters.items()}
            self._buffers = {name: torch.zeros_like(p) for name, p in named.items()}

    @staticmethod
    def fits(parameter: Tensor) -> bool:
        """Whether the kernel can move this parameter: on an accelerator it reads learning rates in float32 only."""
        return parameter.dtype == torch.float32 or (parameter.dtype == torch.float64 and parameter.is_cpu)

    @torch.no_grad()
    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, _step: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        for group in self._groups:
            parameters: list[Tensor] = list(group.parameters.values())
            buffers = [self._buffers[name] for name in group.parameters] if self._momentum else []
            # A parameter without a gradient took no part, which other replicas would call a gradient of zero.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            rate = lr * group.lr_factor
            torch._fused_sgd_(
                parameters, gradients, buffers, weight_decay=group.decay, momentum=self._momentum,
                lr=rate if rate.is_cpu else rate.float(), dampening=0.0, nesterov=self._nesterov, maximize=False,
                is_first_step=False, grad_scale=divisor.float(), found_inf=bad,
            )  # fmt: skip
            for parameter in parameters:
                parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        return {f"{name}.momentum": buffer for name, buffer in self._buffers.items()}


@dataclass(frozen=True)
class DescentRule:
    """The same formula for the rows of a slab."""

    momentum: float
    nesterov: bool
    counts = False

    @property
    def starts(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        return descend(now, now.decayed, self.momentum, self.nesterov)


def descend(now: Moment, gradient: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A step with momentum, if any, along a gradient; the learning rate stays outside the momentum."""
    if "momentum" not in now.state:
        return torch.addcmul(now.weights, gradient, now.lr, value=-1), {}
    kept = gradient.add(now.state["momentum"], alpha=momentum)
    direction = gradient.add(kept, alpha=momentum) if nesterov else kept
    return torch.addcmul(now.weights, direction, now.lr, value=-1), {"momentum": kept}
