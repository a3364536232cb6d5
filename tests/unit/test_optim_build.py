"""Optimizers against their formulas in float64, what weight decay leaves alone, and steps that are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optim_cases import BAD, FEW, parameters, plan_of, steps, take_step
from paceline.optim.build import build_optimizer, decays, parameter_groups
from paceline.settings.optimizer import WeightDecay


@pytest.mark.parametrize("divisor", [1.0, 3.0, 48.0])
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize(
    ("optimizer", "momentum", "nesterov"),
    [
        ("{name: sgd, lr: 1}", 0.0, False),
        ("{name: sgd, lr: 1, momentum: 0.9}", 0.9, False),
        ("{name: sgd, lr: 1, momentum: 0.7}", 0.7, False),
        ("{name: sgd, lr: 1, momentum: 0.8, nesterov: true}", 0.8, True),
        ("{name: sgd, lr: 1, momentum: 0}", 0.0, False),
    ],
)
def test_every_step_is_its_formula(
    optimizer: str, momentum: float, nesterov: bool, decay: float, divisor: float
) -> None:
    weights = parameters()
    ours = build_optimizer(weights.items(), plan_of(optimizer, f"weight_decay.rate={decay}"))
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    moved = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for summed, lr in zip(steps(weights, 6), (0.1, 0.2, 0.0, 0.05, 3.0, 0.1), strict=True):
        take_step(ours, lr, divisor)
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
    assert build_optimizer(parameters().items(), plan_of("{name: sgd, lr: 1}")).tensors() == {}


def test_a_rate_of_zero_moves_no_weight_but_gathers_momentum() -> None:
    weights = parameters()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    ours = build_optimizer(weights.items(), plan_of("{name: sgd, lr: 0, momentum: 0.9}"))
    for summed in steps(weights, 1):
        take_step(ours, 0.0, 4.0)
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
        for name, gradient in summed.items():
            assert torch.allclose(ours.tensors()[f"{name}.momentum"], gradient / 4, rtol=1e-12)


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 1}", "{name: sgd, lr: 1, momentum: 0.9, nesterov: true}"])
def test_a_bad_step_leaves_weights_and_momentum_alone(optimizer: str) -> None:
    weights = parameters()
    ours = build_optimizer(
        weights.items(), plan_of(optimizer, "weight_decay.rate=0.1", "weight_decay.skip_names=[norm]")
    )
    for _ in steps(weights, 2):
        take_step(ours, 0.1, 2.0)
    before = {name: tensor.detach().clone() for name, tensor in (*weights.items(), *ours.tensors().items())}
    for _ in steps(weights, 1):
        gradient = weights["dense.weight"].grad
        assert gradient is not None
        gradient[0, 1] = float("inf")
        take_step(ours, 0.1, 2.0, BAD)
    for name, tensor in (*weights.items(), *ours.tensors().items()):
        assert torch.equal(tensor, before[name])
    assert all(weight.grad is None for weight in weights.values())
    for _ in steps(weights, 1):
        take_step(ours, 0.1, 2.0)
    assert not any(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(
    ("names", "dimensions", "decayed"),
    [
        ("[]", "[]", set(FEW)),
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
    plan = plan_of("{name: sgd, lr: 1}", *words)
    weights = parameters()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    take_step(build_optimizer(weights.items(), plan), 1.0, 1.0)
    for name, weight in weights.items():
        assert decays(plan.recipe.weight_decay, name, weight) == (name in decayed)
        assert torch.allclose(weight, before[name] * (0.75 if name in decayed else 1), rtol=1e-12)


def test_weight_decay_of_zero_pulls_at_nothing() -> None:
    assert not any(decays(WeightDecay(), name, weight) for name, weight in parameters().items())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)])
def test_a_block_s_learning_rate_is_multiplied_by_its_factor(momentum: float, nesterov: bool) -> None:
    optimizer = f"{{name: sgd, lr: 1, momentum: {momentum}, nesterov: {str(nesterov).lower()}}}"
    factors = {"conv": 0.1, "dense": 10.0, "norm": 1.0}
    words = ("weight_decay={rate: 0.02, skip_names: [bias]}", "lr_factors={conv: 0.1, dense: 10}")
    weights = parameters()
    ours = build_optimizer(weights.items(), plan_of(optimizer, *words))
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    moved = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for summed in steps(weights, 3):
        take_step(ours, 0.05, 4.0)
        for name, weight in expected.items():
            gradient = summed[name] / 4 + (0 if "bias" in name else 0.02) * weight
            moved[name] = momentum * moved[name] + gradient
            direction = gradient + momentum * moved[name] if nesterov else moved[name]
            expected[name] = weight - 0.05 * factors[name.partition(".")[0]] * direction
            assert torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12)


def test_parameters_are_grouped_by_decay_and_factor() -> None:
    plan = plan_of("{name: sgd, lr: 1}", "weight_decay={rate: 0.5, skip_dimensions: [1]}", "lr_factors={dense: 2}")
    groups = parameter_groups(plan, parameters())
    assert {(group.decay, group.lr_factor): set(group.parameters) for group in groups} == {
        (0.5, 1.0): {"conv.weight"},
        (0.0, 1.0): {"norm.weight", "norm.bias"},
        (0.5, 2.0): {"dense.weight"},
        (0.0, 2.0): {"dense.bias"},
    }


def test_a_factor_of_zero_keeps_a_block_where_it_is() -> None:
    weights = parameters()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    ours = build_optimizer(weights.items(), plan_of("{name: sgd, lr: 1, momentum: 0.9}", "lr_factors.conv=0"))
    for _ in steps(weights, 2):
        take_step(ours, 0.1, 1.0)
    assert [name for name, weight in weights.items() if torch.equal(weight, before[name])] == ["conv.weight"]


def test_parameters_that_stand_still_are_left_alone() -> None:
    weights = parameters()
    weights["conv.weight"].requires_grad_(False)
    before = weights["conv.weight"].clone()
    ours = build_optimizer(weights.items(), plan_of("{name: sgd, lr: 1, momentum: 0.9}", "weight_decay.rate=0.5"))
    assert "conv.weight.momentum" not in ours.tensors()
    for name, weight in weights.items():
        weight.grad = None if name == "conv.weight" else torch.ones_like(weight)
    take_step(ours, 0.1, 1.0)
    assert torch.equal(weights["conv.weight"], before)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        (
            "{all: 0.1, top: 2}",
            {"stem": 0.1, "stage1/unit1": 0.1, "top": 2.0, "head": 0.1},
        ),  # 'top' is as long as 'all'
        ("{top: 2, all: 0.1}", {"stem": 0.1, "stage1/unit1": 0.1, "top": 2.0, "head": 0.1}),
        ("{stage1: 0.5, stage1/unit1: 3, all: 7}", {"stem": 7.0, "stage1/unit1": 3.0, "stage2/unit1": 7.0}),
        (
            "{stage2/unit2: 3, stage2: 0.5}",
            {"stage2/unit1": 0.5, "stage2/unit2": 3.0, "stage3/unit1": 1.0, "head": 1.0},
        ),
        ("{}", {"stem": 1.0, "head": 1.0}),
    ],
)
def test_the_most_particular_name_decides_a_block_s_factor(factors: str, expected: dict[str, float]) -> None:
    from conftest import make_plan as small_plan

    plan = small_plan("model=efficientnet-cifar", f"lr_factors={factors}")
    assert {block: plan.lr_factor(block) for block in expected} == expected


def test_a_factor_multiplies_the_steps_of_a_whole_block_of_a_network() -> None:
    from conftest import make_plan as small_plan
    from conftest import make_session
    from paceline.data.load.loader import open_loader
    from paceline.training.state import build_state, initialize_state
    from paceline.training.step import take_step
    from paceline.world import World

    world = World(torch.device("cpu"))
    moved: list[dict[str, Tensor]] = []
    for words in ((), ("lr_factors={head: 10, stage2: 0.25, stem: 0}",)):
        plan = small_plan("weight_decay.rate=0.01", "on.precision=fp64", *words)
        state = build_state(plan, world)
        initialize_state(state, plan)
        before = {name: weight.detach().clone() for name, weight in state.network.module.named_parameters()}
        share = next(open_loader(plan, None, 0, world.device).training(0))
        take_step(make_session(plan, state=state), share)
        moved.append({name: p.detach() - before[name] for name, p in state.network.module.named_parameters()})
    factors = {"head": 10.0, "stage2/unit1": 0.25, "stem": 0.0}
    for name, by in moved[0].items():
        factor = factors.get(name.partition(".")[0], 1.0)
        assert by.any()
        assert torch.allclose(moved[1][name], factor * by, rtol=1e-9, atol=1e-15)
        assert bool(moved[1][name].any()) == (factor > 0)
