"""Gradient clipping against its definitions, alone and all together, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optim_cases import MANY, OPTIMIZERS, everything, parameters, plan_of, steps, take_step
from paceline.optim.build import build_optimizer, head_weights

LIMITS = {"value": 0.4, "norm": 2.0, "adaptive": 0.05}


def clipped(weights: dict[str, Tensor], mean: dict[str, Tensor], limits: dict[str, float]) -> dict[str, Tensor]:
    """The gradients within the limits, by the definitions."""
    if "value" in limits:
        mean = {name: gradient.clamp(-limits["value"], limits["value"]) for name, gradient in mean.items()}
    if "norm" in limits:
        norm = sum(float((gradient**2).sum()) for gradient in mean.values()) ** 0.5
        mean = {name: gradient * min(1.0, limits["norm"] / norm) for name, gradient in mean.items()}
    if "adaptive" in limits:
        mean = {name: gradient.clone() for name, gradient in mean.items()}
        for name, gradient in mean.items():
            if gradient.dim() > 1 and name != "head.weight":
                for number, weight in enumerate(weights[name]):
                    most, norm = limits["adaptive"] * max(float(weight.norm()), 1e-3), float(gradient[number].norm())
                    if norm > most:
                        gradient[number] *= most / norm
    return mean


@pytest.mark.parametrize(
    "keys", [("value",), ("norm",), ("adaptive",), ("value", "norm", "adaptive"), ("norm", "adaptive")], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_within_bounds_is_a_step_along_the_bounded_gradient(optimizer: str, keys: tuple[str, ...]) -> None:
    limits = {key: LIMITS[key] for key in keys}
    bounds = ", ".join(f"{key}: {limit}" for key, limit in limits.items())
    words = ("weight_decay={rate: 0.02, skip_names: [bias]}", "lr_factors.conv=0.5")
    weights, other = parameters(MANY), parameters(MANY)
    ours = build_optimizer(weights.items(), plan_of(optimizer, f"clip={{{bounds}}}", *words, shapes=MANY))
    free = build_optimizer(other.items(), plan_of(optimizer, *words, shapes=MANY))
    for summed in steps(weights, 3):
        mean = {name: gradient / 3 for name, gradient in summed.items()}
        bounded = clipped({name: weight.detach() for name, weight in weights.items()}, mean, limits)
        assert any(not torch.equal(bounded[name], mean[name]) for name in mean)
        for name, weight in other.items():
            weight.grad = bounded[name].clone()
        take_step(ours, 0.1, 3.0)
        take_step(free, 0.1, 1.0)
        expected = everything(other, free)
        for name, tensor in everything(weights, ours).items():
            assert torch.allclose(tensor, expected[name], rtol=1e-11, atol=1e-12), name


def stepped(bounds: str, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far plain descent at a rate of 1 moves weights downwards, within bounds."""
    named = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    ours = build_optimizer(named.items(), plan_of("{name: sgd, lr: 1}", f"clip={bounds}", shapes=shapes))
    for name, parameter in named.items():
        parameter.grad = gradients[name].clone()
    take_step(ours, 1.0, 1.0)
    return {name: weights[name] - parameter.detach() for name, parameter in named.items()}


def test_a_gradient_inside_the_bounds_is_left_as_it_is() -> None:
    weights = {name: 4 * weight.detach() for name, weight in parameters(MANY).items()}
    gradients = {name: torch.full_like(weight, 2.0**-10) for name, weight in weights.items()}
    moved = stepped("{value: 1, norm: 1, adaptive: 0.5}", weights, gradients)
    assert all(torch.allclose(moved[name], gradient, rtol=1e-12, atol=0) for name, gradient in gradients.items())


def test_a_gradient_of_zero_stays_zero() -> None:
    weights = {name: weight.detach() for name, weight in parameters(MANY).items()}
    moved = stepped("{norm: 1, adaptive: 0.5}", weights, {name: torch.zeros_like(w) for name, w in weights.items()})
    assert not any(by.any() for by in moved.values())


def test_weights_of_zero_can_leave_zero_under_adaptive_clipping() -> None:
    zero = torch.zeros(2, 3, dtype=torch.float64)
    weights = {"conv.weight": zero, "head.weight": zero}
    gradients = {"conv.weight": torch.eye(2, 3, dtype=torch.float64), "head.weight": torch.ones_like(zero)}
    moved = stepped("{adaptive: 0.5}", weights, gradients)
    assert torch.allclose(moved["conv.weight"], 5e-4 * gradients["conv.weight"], rtol=1e-12)
    assert torch.equal(moved["head.weight"], gradients["head.weight"])


def test_the_head_is_the_last_matrix_of_the_last_block() -> None:
    weights = parameters(MANY)
    assert head_weights(plan_of("{name: sgd, lr: 1}", shapes=MANY), weights) == {"head.weight"}
    one_block = {"network.dense.weight": weights["dense.weight"], "network.fc.weight": weights["head.weight"]}
    assert head_weights(plan_of("{name: sgd, lr: 1}", shapes={"network.fc": ()}), one_block) == {"network.fc.weight"}
    stage = {name: weight for name, weight in weights.items() if not name.startswith("head")}
    assert head_weights(plan_of("{name: sgd, lr: 1}", shapes=MANY), stage) == set()
