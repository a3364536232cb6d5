"""Optimisers against their formulas in float64, what weight decay leaves alone, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from conftest import make_recipe
from paceline import keyed
from paceline.optim.build import build_optimiser, decays
from paceline.recipe import Recipe, WeightDecay

GOOD = torch.zeros(())
BAD = torch.ones(())
SHAPES = {
    "conv.weight": (3, 2, 2, 2),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "dense.weight": (2, 3),
    "dense.bias": (2,),
}


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.from_numpy(keyed.normals(keyed.key(0, name), count)).view(shape)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(numbers(name, shape)) for name, shape in SHAPES.items()}


def steps(weights: dict[str, nn.Parameter], count: int) -> Iterator[dict[str, Tensor]]:
    """Gradients of `count` steps, put in place as they are given."""
    for step in range(count):
        summed = {name: 7 * numbers(f"{name}/{step}", tuple(weight.shape)) for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = summed[name].clone()
        yield summed


def recipe_of(optimiser: str, *words: str) -> Recipe:
    return make_recipe(f"optimiser={optimiser}", *words)


@pytest.mark.parametrize("divisor", [1.0, 3.0, 48.0])
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize(
    ("optimiser", "momentum", "nesterov"),
    [
        ("{name: sgd, lr: 1}", 0.0, False),
        ("{name: momentum, lr: 1}", 0.9, False),
        ("{name: momentum, lr: 1, momentum: 0.7}", 0.7, False),
        ("{name: momentum, lr: 1, momentum: 0.8, nesterov: true}", 0.8, True),
        ("{name: momentum, lr: 1, momentum: 0}", 0.0, False),
    ],
)
def test_every_step_is_its_formula(
    optimiser: str, momentum: float, nesterov: bool, decay: float, divisor: float
) -> None:
    weights = parameters()
    ours = build_optimiser(weights.items(), recipe_of(optimiser, f"weight_decay.rate={decay}"))
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    moved = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for summed, lr in zip(steps(weights, 6), (0.1, 0.2, 0.0, 0.05, 3.0, 0.1), strict=True):
        ours.step(lr, torch.tensor(divisor), GOOD)
        for name, weight in expected.items():
            gradient = summed[name] / divisor + decay * weight
            moved[name] = momentum * moved[name] + gradient
            direction = gradient + momentum * moved[name] if nesterov else moved[name]
            expected[name] = weight - lr * direction
            assert torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12)
    buffers = ours.tensors()
    if momentum:
        assert buffers.keys() == {f"{name}.momentum" for name in weights}
        for name, buffer in moved.items():
            assert torch.allclose(buffers[f"{name}.momentum"], buffer, rtol=1e-12, atol=1e-12)


def test_plain_descent_carries_nothing_from_step_to_step() -> None:
    assert build_optimiser(parameters().items(), recipe_of("{name: sgd, lr: 1}")).tensors() == {}


def test_a_rate_of_zero_moves_no_weight_but_gathers_momentum() -> None:
    weights = parameters()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    ours = build_optimiser(weights.items(), recipe_of("{name: momentum, lr: 0}"))
    for summed in steps(weights, 1):
        ours.step(0.0, torch.tensor(4.0), GOOD)
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
        for name, gradient in summed.items():
            assert torch.allclose(ours.tensors()[f"{name}.momentum"], gradient / 4, rtol=1e-12)


@pytest.mark.parametrize("optimiser", ["{name: sgd, lr: 1}", "{name: momentum, lr: 1, nesterov: true}"])
def test_a_bad_step_leaves_weights_and_momentum_alone(optimiser: str) -> None:
    weights = parameters()
    ours = build_optimiser(
        weights.items(), recipe_of(optimiser, "weight_decay.rate=0.1", "weight_decay.skip_names=[norm]")
    )
    for _ in steps(weights, 2):
        ours.step(0.1, torch.tensor(2.0), GOOD)
    before = {name: tensor.detach().clone() for name, tensor in (*weights.items(), *ours.tensors().items())}
    for _ in steps(weights, 1):
        gradient = weights["dense.weight"].grad
        assert gradient is not None
        gradient[0, 1] = float("inf")
        ours.step(0.1, torch.tensor(2.0), BAD)
    for name, tensor in (*weights.items(), *ours.tensors().items()):
        assert torch.equal(tensor, before[name])
    assert all(weight.grad is None for weight in weights.values())
    for _ in steps(weights, 1):
        ours.step(0.1, torch.tensor(2.0), GOOD)
    assert not any(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(
    ("names", "dimensions", "decayed"),
    [
        ("[]", "[]", set(SHAPES)),
        ("[norm]", "[]", {"conv.weight", "dense.weight", "dense.bias"}),
        ("[bias]", "[]", {"conv.weight", "norm.weight", "dense.weight"}),
        ("[norm, bias]", "[]", {"conv.weight", "dense.weight"}),
        ("[]", "[1]", {"conv.weight", "dense.weight"}),
        ("[]", "[1, 2]", {"conv.weight"}),
        ("[conv]", "[1]", {"dense.weight"}),
        ("[weight, bias]", "[]", set()),
    ],
)
def test_weight_decay_leaves_out_what_it_is_told_to(names: str, dimensions: str, decayed: set[str]) -> None:
    words = ("weight_decay.rate=0.25", f"weight_decay.skip_names={names}", f"weight_decay.skip_dimensions={dimensions}")
    recipe = recipe_of("{name: sgd, lr: 1}", *words)
    weights = parameters()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    build_optimiser(weights.items(), recipe).step(1.0, torch.tensor(1.0), GOOD)
    for name, weight in weights.items():
        assert decays(recipe.weight_decay, name, weight) == (name in decayed)
        assert torch.allclose(weight, before[name] * (0.75 if name in decayed else 1), rtol=1e-12)


def test_weight_decay_of_zero_pulls_at_nothing() -> None:
    assert not any(decays(WeightDecay(), name, weight) for name, weight in parameters().items())
