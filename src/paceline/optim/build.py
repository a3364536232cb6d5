"""From a recipe's optimiser settings to an optimiser, with what weight decay leaves alone in plain sight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from paceline.optim.descent import Descent, Group
from paceline.plan import Plan
from paceline.recipe import Momentum, Sgd, WeightDecay


class Optimiser(Protocol):
    """What the step needs of an optimiser."""

    def step(self, lr: float, divisor: Tensor, bad: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        ...


def build_optimiser(parameters: Iterable[tuple[str, nn.Parameter]], plan: Plan) -> Optimiser:
    """The optimiser of a recipe for the named parameters of a network that train."""
    groups = group(plan, {name: p for name, p in parameters if p.requires_grad})
    match plan.recipe.optimiser:
        case Sgd():
            return Descent(groups, momentum=0.0, nesterov=False)
        case Momentum(momentum=momentum, nesterov=nesterov):
            return Descent(groups, momentum, nesterov)


def group(plan: Plan, named: dict[str, nn.Parameter]) -> list[Group]:
    """Parameters by how weight decay pulls at them and what their learning rate is multiplied by."""
    decay = plan.recipe.weight_decay
    found: dict[tuple[float, float], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        rate = decay.rate if decays(decay, name, parameter) else 0.0
        found.setdefault((rate, plan.lr_factor(name.partition(".")[0])), {})[name] = parameter
    return [Group(rate, factor, members) for (rate, factor), members in found.items()]


def decays(decay: WeightDecay, name: str, parameter: Tensor) -> bool:
    """Whether weight decay pulls at this parameter."""
    skipped = any(word in name for word in decay.skip_names) or parameter.dim() in decay.skip_dimensions
    return decay.rate > 0 and not skipped
