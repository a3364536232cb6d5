"""Optimisers of a recipe, with what weight decay leaves alone in plain sight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.recipe import Momentum, Recipe, Sgd, WeightDecay


class Optimiser:
    """torch's fused SGD: one call that divides the summed gradients, decays, and skips a step that is not finite.

    Gradients are sums over images; the division by their number and the decision to skip happen in the kernel, so the
    host never waits.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> None:
        self.named = dict(parameters)
        decayed = {name: p for name, p in self.named.items() if decays(recipe.weight_decay, name, p)}
        kept = {name: p for name, p in self.named.items() if name not in decayed}
        groups = [
            {"params": list(decayed.values()), "weight_decay": recipe.weight_decay.rate},
            {"params": list(kept.values()), "weight_decay": 0.0},
        ]
        momentum, nesterov = 0.0, False
        match recipe.optimiser:
            case Momentum(momentum=momentum, nesterov=nesterov):
                pass
            case Sgd():
                pass
        self._sgd = torch.optim.SGD(
            [group for group in groups if group["params"]], lr=0.0, momentum=momentum, nesterov=nesterov, fused=True
        )
        if momentum:
            for parameter in self.named.values():
                # Zeros rather than nothing: torch would leave them unset if the very first step is skipped.
                self._sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step(self, lr: float, divisor: Tensor, finite: Tensor) -> None:
        """Move the weights by gradients / divisor, unless `finite` says no."""
        for group in self._sgd.param_groups:
            group["lr"] = lr
        self._sgd.grad_scale = divisor  # type: ignore[attr-defined]
        self._sgd.found_inf = (~finite).to(divisor.dtype)  # type: ignore[attr-defined]
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        return {
            f"{name}.momentum": self._sgd.state[p]["momentum_buffer"]
            for name, p in self.named.items()
            if "momentum_buffer" in self._sgd.state[p]
        }


def decays(decay: WeightDecay, name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls at this parameter."""
    return not (any(word in name for word in decay.skip_names) or parameter.dim() in decay.skip_dimensions)
