"""Gradient descent with or without momentum, by torch's fused kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike."""

    decay: float
    lr_factor: float
    parameters: dict[str, nn.Parameter]


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

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, bad: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        for group in self._groups:
            parameters: list[Tensor] = list(group.parameters.values())
            buffers = [self._buffers.get(name) for name in group.parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            sgd(
                parameters, gradients, buffers, fused=True, foreach=False, grad_scale=divisor, found_inf=bad,
                weight_decay=group.decay, momentum=self._momentum, lr=lr * group.lr_factor, dampening=0.0,
                nesterov=self._nesterov, maximize=False,
            )  # fmt: skip
            for parameter in parameters:
                parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        return {f"{name}.momentum": buffer for name, buffer in self._buffers.items()}
