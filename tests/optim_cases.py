"""Parameters, gradients and optimizers for the tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from conftest import make_recipe
from paceline import keyed
from paceline.facts import NetworkFacts
from paceline.machine import Machine
from paceline.optim.build import Optimizer
from paceline.planning import Plan
from paceline.reconcile import make_plan
from paceline.settings.placement import Placement

GOOD = torch.zeros(())
BAD = torch.ones(())
Shapes = Mapping[str, tuple[int, ...]]
FEW: Shapes = {
    "conv.weight": (3, 2, 2, 2),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "dense.weight": (2, 3),
    "dense.bias": (2,),
}
MANY: Shapes = {
    **FEW,
    "tall.weight": (9, 1, 2, 2),
    "again.weight": (3, 2, 2, 2),
    "wide.weight": (70, 3),
    "alone.weight": (),
    "head.weight": (4, 3),
    "head.bias": (4,),
}
"""With equal shapes, tall matrices, a parameter of more than one block and one of a single number."""
RATES = (0.1, 0.2, 0.0, 0.05, 3.0, 0.1)
"""A learning rate that changes, and is zero once."""

OPTIMIZERS = [
    "{name: sgd, lr: 0.2}",
    "{name: sgd, lr: 0.2, momentum: 0.9}",
    "{name: sgd, lr: 0.2, momentum: 0.7, nesterov: true}",
    "{name: rmsprop, lr: 0.2}",
    "{name: rmsprop, lr: 0.2, decay: 0.6, momentum: 0, epsilon: 0.1}",
    "{name: rmsprop, lr: 0.2, form: torch, epsilon: 0.01}",
    "{name: lars, lr: 0.2}",
    "{name: lars, lr: 0.2, trust_coefficient: 0.1, decay: 0.03, epsilon: 0.2, skip_names: [again], "
    "skip_dimensions: [0, 1]}",
    "{name: lars, lr: 0.2, trust_coefficient: 0.1, decay: 0.03, momentum: 0.5, momentum_correction: true}",
    "{name: lars, lr: 0.2, trust_coefficient: 0.1, momentum: 0, momentum_correction: true}",
    "{name: larc, lr: 0.2}",
    "{name: larc, lr: 0.2, trust_coefficient: 0.5, nesterov: false}",
    "{name: larc, lr: 0.2, trust_coefficient: 0.5, mode: scale}",
    "{name: larc, lr: 0.2, trust_coefficient: 0.5, momentum: 0}",
    "{name: adamw, lr: 0.2}",
    "{name: adamw, lr: 0.2, betas: [0, 0.5], epsilon: 0.1}",
    "{name: lamb, lr: 0.2}",
    "{name: lamb, lr: 0.2, betas: [0.5, 0.9], epsilon: 0.1}",
    "{name: lamb, lr: 0.2, scales: decayed}",
    "{name: muon, lr: 0.2}",
    "{name: muon, lr: 0.2, momentum: 0.5, nesterov: false, iterations: 2, adamw_lr: 0.05, skip_names: [dense]}",
]
CLIPS = ["{}", "{value: 0.5, norm: 1.5, adaptive: 0.1}"]


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.from_numpy(keyed.normals(keyed.key(0, name), count)).view(shape)


def parameters(shapes: Shapes = FEW) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(numbers(name, shape)) for name, shape in shapes.items()}


def steps(weights: dict[str, nn.Parameter], count: int) -> Iterator[dict[str, Tensor]]:
    """Gradients of `count` steps, put in place as they are given."""
    for step in range(count):
        summed = {name: 7 * numbers(f"{name}/{step}", tuple(weight.shape)) for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = summed[name].to(weight.dtype, copy=True)
        yield summed


def take_step(optimizer: Optimizer, lr: float, divisor: float, bad: Tensor = GOOD, step: int = 0) -> None:
    """A step with everything it needs as tensors."""
    wide = torch.float64
    optimizer.step(torch.tensor(lr, dtype=wide), torch.tensor(divisor, dtype=wide), bad, torch.tensor(step))


def plan_of(optimizer: str, *words: str, shapes: Shapes = FEW) -> Plan:
    """A plan for a network whose blocks are those of the parameters."""
    recipe = make_recipe(f"optimizer={optimizer}", *(word for word in words if not word.startswith("on.")))
    placement = Placement(stochastic_rounding="on.stochastic_rounding=false" not in words)
    assert recipe.data is not None
    blocks = tuple(dict.fromkeys(name.partition(".")[0] for name in shapes))
    return make_plan(recipe, placement, Machine(1, 1 << 30), NetworkFacts(1, 1, blocks=blocks))


def everything(weights: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all weights and all that the optimizer carries."""
    return {name: tensor.detach().clone() for name, tensor in (*weights.items(), *optimizer.tensors().items())}
