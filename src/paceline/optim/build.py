"""From a recipe's optimiser settings to an optimiser, with what weight decay leaves alone in plain sight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from paceline.optim.descent import Descent, Group
from paceline.recipe import Momentum, Recipe, Sgd, WeightDecay


class Optimiser(Protocol):
    """What the step needs of an optimiser."""

    def step(self, lr: float, divisor: Tensor, bad: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        ...


def build_optimiser(parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> Optimiser:
    """The optimiser of a recipe for a network's named parameters."""
    groups = decay_groups(dict(parameters), recipe.weight_decay)
    match recipe.optimiser:
        case Sgd():
            return Descent(groups, momentum=0.0, nesterov=False)
        case Momentum(momentum=momentum, nesterov=nesterov):
            return Descent(groups, momentum, nesterov)


def decay_groups(named: dict[str, nn.Parameter], decay: WeightDecay) -> list[Group]:
    """The parameters that weight decay pulls at, and those it leaves alone."""
    pulled = {name: p for name, p in named.items() if decays(decay, name, p)}
    left = {name: p for name, p in named.items() if name not in pulled}
    return [(rate, group) for rate, group in ((decay.rate, pulled), (0.0, left)) if group]


def decays(decay: WeightDecay, name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls at this parameter."""
    skipped = any(word in name for word in decay.skip_names) or parameter.dim() in decay.skip_dimensions
    return decay.rate > 0 and not skipped
