"""Optimisers of a recipe, with what weight decay leaves alone in plain sight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from paceline.recipe import Momentum, Recipe, Sgd, WeightDecay


class Optimiser:
    """Gradient descent with or without momentum, by torch's fused kernel.

    Gradients are sums over images; the division by their number and the decision to skip a step that is not finite
    happen in the kernel, so the host never waits.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> None:
        self._momentum, self._nesterov = _kind(recipe.optimiser)
        named = dict(parameters)
        self._buffers = {name: torch.zeros_like(p) for name, p in named.items()} if self._momentum else {}
        self._groups: list[tuple[float, list[Tensor], list[Tensor | None]]] = []
        for rate in sorted({recipe.weight_decay.rate, 0.0}):
            names = [n for n, p in named.items() if decays(recipe.weight_decay, n, p) == (rate > 0)]
            if names:
                self._groups.append((rate, [named[n] for n in names], [self._buffers.get(n) for n in names]))

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, bad: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        for rate, parameters, buffers in self._groups:
            gradients = [p.grad for p in parameters if p.grad is not None]
            sgd(
                parameters, gradients, buffers, fused=True, foreach=False, grad_scale=divisor, found_inf=bad,
                weight_decay=rate, momentum=self._momentum, lr=lr, dampening=0.0, nesterov=self._nesterov,
                maximize=False,
            )  # fmt: skip
            for parameter in parameters:
                parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        return {f"{name}.momentum": buffer for name, buffer in self._buffers.items()}


def _kind(optimiser: Sgd | Momentum) -> tuple[float, bool]:
    match optimiser:
        case Sgd():
            return 0.0, False
        case Momentum():
            return optimiser.momentum, optimiser.nesterov


def decays(decay: WeightDecay, name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls at this parameter."""
    skipped = any(word in name for word in decay.skip_names) or parameter.dim() in decay.skip_dimensions
    return decay.rate > 0 and not skipped
