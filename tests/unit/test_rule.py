"""Every optimizer, step by step, against its definition for one tensor in float64, and against torch's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optim_cases import (
    BAD,
    CLIPS,
    GOOD,
    MANY,
    OPTIMIZERS,
    RATES,
    everything,
    numbers,
    parameters,
    plan_of,
    steps,
    take_step,
)
from paceline.optim.build import build_optimizer
from paceline.optim.muon import orthogonalize
from paceline.settings.optimizer import AdamW, Lamb, Larc, Lars, Muon, OptimizerSettings, RmsProp, Sgd

DECAY = 0.02
FACTORS = {"conv": 0.1, "dense": 10.0}
WORDS = (f"weight_decay={{rate: {DECAY}, skip_names: [bias]}}", "lr_factors={conv: 0.1, dense: 10}")


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def norm(tensor: Tensor) -> float:
    return math.sqrt(float((tensor * tensor).sum()))


def ratio(w: Tensor, g: Tensor, trust: float, decay: float = 0.0, epsilon: float = 0.0) -> float:
    return trust * norm(w) / (norm(g) + decay * norm(w) + epsilon) if norm(w) > 0 and norm(g) > 0 else 1.0


def adam(state: dict[str, Tensor], g: Tensor, betas: tuple[float, float], epsilon: float, step: int) -> Tensor:
    zero = torch.zeros_like(g)
    state["mean"] = betas[0] * state.get("mean", zero) + (1 - betas[0]) * g
    state["square"] = betas[1] * state.get("square", zero) + (1 - betas[1]) * g * g
    return (state["mean"] / (1 - betas[0] ** step)) / ((state["square"] / (1 - betas[1] ** step)).sqrt() + epsilon)


def by_singular_values(direction: Tensor, iterations: int) -> Tensor:
    """What Newton-Schulz iterations come to: the polynomial, applied to each singular value."""
    left, values, right = torch.linalg.svd(direction.reshape(len(direction), -1), full_matrices=False)
    values = values / norm(values)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    rows, columns = left.shape[0], right.shape[1]
    result: Tensor = left @ values.diag() @ right
    return result.reshape(direction.shape) * math.sqrt(max(1, rows / columns))


def move(  # noqa: C901
    rule: OptimizerSettings, name: str, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, step: int
) -> Tensor:
    """One tensor's new weights by the definition; `state` changes in place."""
    decay = 0.0 if "bias" in name else DECAY
    plain, g = g, g + decay * w
    m = state.get("momentum", torch.zeros_like(w))
    match rule:
        case Sgd(momentum=0):
            return w - lr * g
        case Sgd():
            state["momentum"] = rule.momentum * m + g
            return w - lr * (g + rule.momentum * state["momentum"] if rule.nesterov else state["momentum"])
        case RmsProp(form="tensorflow"):
            square = state.get("square", torch.ones_like(w))
            state["square"] = square + (1 - rule.decay) * (g * g - square)
            state["momentum"] = rule.momentum * m + lr * g / (state["square"] + rule.epsilon).sqrt()
            return w - state["momentum"]
        case RmsProp():
            state["square"] = rule.decay * state.get("square", torch.zeros_like(w)) + (1 - rule.decay) * g * g
            state["momentum"] = rule.momentum * m + g / (state["square"].sqrt() + rule.epsilon)
            return w - lr * state["momentum"]
        case Lars():
            if not (any(word in name for word in rule.skip_names) or w.dim() in rule.skip_dimensions):
                g = ratio(w, g, rule.trust_coefficient, rule.decay, rule.epsilon) * (g + rule.decay * w)
            state["momentum"] = rule.momentum * m + (g if rule.momentum_correction else lr * g)
            return w - (lr * state["momentum"] if rule.momentum_correction else state["momentum"])
        case Larc():
            local = ratio(w, g, rule.trust_coefficient)
            g = g * (local if rule.mode == "scale" else min(local / lr, 1) if lr else 1)
            state["momentum"] = rule.momentum * m + g
            return w - lr * (g + rule.momentum * state["momentum"] if rule.nesterov else state["momentum"])
        case AdamW():
            return w - lr * (adam(state, plain, rule.betas, rule.epsilon, step) + decay * w)
        case Lamb():
            u = adam(state, plain, rule.betas, rule.epsilon, step) + decay * w
            return w - lr * (ratio(w, u, 1.0) if decay or rule.scales == "all" else 1) * u
        case Muon():
            if w.dim() < 2 or any(word in name for word in ("head", *rule.skip_names)):
                lr = lr / 0.2 * rule.adamw_lr
                return w - lr * (adam(state, plain, (0.9, 0.999), 1e-8, step) + decay * w)
            state["momentum"] = rule.momentum * m + plain
            direction = plain + rule.momentum * state["momentum"] if rule.nesterov else state["momentum"]
            return w - lr * (by_singular_values(direction, rule.iterations) + decay * w)


@pytest.mark.parametrize("loose", [False, True], ids=["fused", "flat"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_step_is_its_definition(optimizer: str, loose: bool) -> None:
    """`loose` bounds that clip nothing make sgd leave torch's fused kernel."""
    weights = parameters(MANY)
    plan = plan_of(optimizer, *WORDS, *(["clip.value=1e9"] if loose else []), shapes=MANY)
    ours = build_optimizer(weights.items(), plan)
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in MANY}
    for step, (summed, lr) in enumerate(zip(steps(weights, len(RATES)), RATES, strict=True), start=1):
        take_step(ours, lr, 48.0)
        for name, weight in expected.items():
            rate = lr * FACTORS.get(name.partition(".")[0], 1.0)
            expected[name] = move(plan.recipe.optimizer, name, weight, summed[name] / 48, states[name], rate, step)
            assert close(weights[name], expected[name]), (name, step)
    carried = ours.tensors()
    defined = {f"{name}.{state}": tensor for name, state_of in states.items() for state, tensor in state_of.items()}
    assert carried.keys() - {"good_steps"} == defined.keys()
    for name, tensor in defined.items():
        assert carried[name].shape == tensor.shape
        assert close(carried[name], tensor), name


TORCH: list[tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = [
    (
        "{name: sgd, lr: 1, momentum: 0.8}",
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.02),
    ),
    (
        "{name: sgd, lr: 1, momentum: 0.8, nesterov: true}",
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.02, nesterov=True),
    ),
    (
        "{name: rmsprop, form: torch, lr: 1, decay: 0.7, momentum: 0.6, epsilon: 0.01}",
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.7, momentum=0.6, eps=0.01, weight_decay=0.02),
    ),
    (
        "{name: adamw, lr: 1, betas: [0.8, 0.99], epsilon: 1e-6}",
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.02),
    ),
]


@pytest.mark.parametrize("clip", ["{}", "{value: 1e9}"])
@pytest.mark.parametrize(("optimizer", "make"), TORCH, ids=[optimizer for optimizer, _ in TORCH])
def test_torch_s_own_optimizer_takes_the_same_steps(
    optimizer: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clip: str
) -> None:
    weights, theirs = parameters(MANY), parameters(MANY)
    plan = plan_of(optimizer, "weight_decay.rate=0.02", f"clip={clip}", shapes=MANY)
    ours, other = build_optimizer(weights.items(), plan), make(list(theirs.values()))
    for summed, lr in zip(steps(weights, len(RATES)), RATES, strict=True):
        take_step(ours, lr, 16.0)
        for name, weight in theirs.items():
            weight.grad = summed[name] / 16
        other.param_groups[0]["lr"] = lr
        other.step()
        assert all(close(weights[name], weight) for name, weight in theirs.items())


Numbers = dict[str, list[float]]


def drive(optimizer: str, weights: Numbers, gradients: list[Numbers], lrs: list[float]) -> Numbers:
    """Weights, and what the optimizer carries, after these steps; a name ending in .weight is a matrix of two rows."""
    shaped = {name: torch.tensor(values, dtype=torch.float64) for name, values in weights.items()}
    named = {
        name: nn.Parameter(row.view(2, -1) if name.endswith("weight") else row.clone()) for name, row in shaped.items()
    }
    ours = build_optimizer(
        named.items(), plan_of(optimizer, shapes={name: tuple(p.shape) for name, p in named.items()})
    )
    for step_gradients, lr in zip(gradients, lrs, strict=True):
        for name, parameter in named.items():
            parameter.grad = torch.tensor(step_gradients[name], dtype=torch.float64).view_as(parameter)
        take_step(ours, lr, 1.0)
    return {name: tensor.reshape(-1).tolist() for name, tensor in everything(named, ours).items()}


GOLDEN_START = {"dense.weight": [0.5, -1.0, 2.0, 0.25], "dense.bias": [0.1, -0.2]}
GOLDEN_GRADIENTS = [
    {"dense.weight": [0.10, -0.20, 0.30, 0.40], "dense.bias": [0.5, -0.25]},
    {"dense.weight": [-0.05, 0.15, 0.25, -0.35], "dense.bias": [0.125, 0.0625]},
    {"dense.weight": [0.02, 0.04, -0.06, 0.08], "dense.bias": [-0.3, 0.7]},
]


@pytest.mark.parametrize(
    ("words", "steps_taken", "weight", "bias"),
    [
        ("", 1, [0.49957917063623009, -0.99915834127246017, 1.9987374067276447, 0.24831705067858023], [-0.4, 0.05]),
        ("", 2, [0.49970263590178871, -0.99990773451643433, 1.9950877549272206, 0.25031951050924178], [-1.1, 0.15]),
        ("", 3, [0.49960370187404485, -1.0010012453763948, 1.9924313939828304, 0.25128243033267672], [-1.58, -0.11]),
        (
            "epsilon: 1e-7",
            3,
            [0.49960370206565091, -1.0010012447865209, 1.9924313950757855, 0.25128243047328541],
            [-1.58, -0.11],
        ),
        (
            "momentum_correction: true",
            2,
            [0.49932388947439577, -0.99915024166164845, 1.9939514209821008, 0.248804856119964],
            [-1.55, 0.375],
        ),
        (
            "momentum_correction: true",
            3,
            [0.49905654105529307, -0.99956719247644221, 1.9935024744717522, 0.24807588813443568],
            [-1.65875, 0.098125],
        ),
    ],
)
def test_lars_gives_the_golden_numbers(words: str, steps_taken: int, weight: list[float], bias: list[float]) -> None:
    optimizer = f"{{name: lars, lr: 1, decay: 5e-5, {words}}}"
    end = drive(optimizer, GOLDEN_START, GOLDEN_GRADIENTS[:steps_taken], [1.0, 2.0, 0.5][:steps_taken])
    assert end["dense.weight"] == pytest.approx(weight, rel=1e-12, abs=0)
    assert end["dense.bias"] == pytest.approx(bias, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("correction", "weight", "bias"),
    [
        (
            "false",
            [9.893402774386951e-05, 0.0010935108599603727, 0.00265636094439007, -0.00096291982343496107],
            [0.48, 0.26],
        ),
        (
            "true",
            [0.00053469683820536284, 0.00083390162958752497, 0.00089789302069705245, 0.0014579359710566429],
            [0.2175, 0.55375],
        ),
    ],
)
def test_lars_carries_the_golden_momentum(correction: str, weight: list[float], bias: list[float]) -> None:
    optimizer = f"{{name: lars, lr: 1, decay: 5e-5, momentum_correction: {correction}}}"
    end = drive(optimizer, GOLDEN_START, GOLDEN_GRADIENTS, [1.0, 2.0, 0.5])
    assert end["dense.weight.momentum"] == pytest.approx(weight, rel=1e-12, abs=0)
    assert end["dense.bias.momentum"] == pytest.approx(bias, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("words", "lr", "factor"),
    [
        ("mode: clip", 0.01, 0.5),  # 0.002 * 5 / 2 = 0.005, half of the rate
        ("mode: clip", 0.004, 1.0),  # slower than the ratio: left alone
        ("mode: clip", 0.0, 1.0),
        ("mode: scale", 0.01, 0.005),
        ("mode: scale", 0.004, 0.005),
    ],
)
def test_larc_bounds_or_scales_the_gradient_of_a_tensor(words: str, lr: float, factor: float) -> None:
    start = {"dense.weight": [3.0, 0.0, 0.0, 4.0]}
    gradient = {"dense.weight": [1.2, 0.0, 1.6, 0.0]}
    end = drive(f"{{name: larc, lr: 1, trust_coefficient: 0.002, {words}}}", start, [gradient], [lr])
    assert end["dense.weight.momentum"] == pytest.approx([1.2 * factor, 0, 1.6 * factor, 0], rel=1e-12)
    moved = 1.9 * lr * factor  # Nesterov: 1 + 0.9
    assert end["dense.weight"] == pytest.approx([3 - 1.2 * moved, 0, -1.6 * moved, 4], rel=1e-12)


def test_rmsprop_of_tensorflow_gives_numbers_worked_out_by_hand() -> None:
    gradients = [{"dense.bias": [2.0]}, {"dense.bias": [-1.0]}]
    optimizer = "{name: rmsprop, lr: 1, decay: 0.9, momentum: 0.5, epsilon: 0.001}"
    first = drive(optimizer, {"dense.bias": [1.0]}, gradients[:1], [0.1])
    assert first["dense.bias.square"] == pytest.approx([1.3], rel=1e-12)  # 1 + 0.1 * (4 - 1)
    assert first["dense.bias.momentum"] == pytest.approx([0.2 / 1.301**0.5], rel=1e-12)
    assert first["dense.bias"] == pytest.approx([0.82465582324231981], rel=1e-12)
    second = drive(optimizer, {"dense.bias": [1.0]}, gradients, [0.1, 0.2])
    assert second["dense.bias.square"] == pytest.approx([1.27], rel=1e-12)  # 1.3 + 0.1 * (1 - 1.3)
    assert second["dense.bias.momentum"] == pytest.approx([0.1 / 1.301**0.5 - 0.2 / 1.271**0.5], rel=1e-12)
    assert second["dense.bias"] == pytest.approx([0.91438520739051381], rel=1e-12)


@pytest.mark.parametrize("form", ["tensorflow", "torch"])
def test_rmsprop_forgets_one_huge_gradient_in_time(form: str) -> None:
    gradients = [{"dense.bias": [value]} for value in (1.0, 1e200, 1.0, 1.0)]  # its square is infinite
    end = drive(f"{{name: rmsprop, form: {form}, lr: 1}}", {"dense.bias": [1.0]}, gradients, [0.1] * 4)
    assert end["dense.bias.square"] == pytest.approx([0.9**2 * sys.float_info.max])
    assert math.isfinite(end["dense.bias"][0])


@pytest.mark.parametrize("optimizer", ["lars, decay: 0.1", "larc, mode: scale, nesterov: false", "lamb"])
@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_the_ratio_is_1_where_weights_or_gradient_are_zero(optimizer: str, zero: str) -> None:
    other = [3.0, -4.0, 1.0, 2.0]
    start = {"dense.weight": [0.0] * 4 if zero == "weights" else other}
    gradient = {"dense.weight": other if zero == "weights" else [0.0] * 4}
    end = drive(f"{{name: {optimizer}, lr: 1}}", start, [gradient], [0.5])
    if "lamb" in optimizer:  # Adam's first step is the sign of the gradient
        expected = [-0.5, 0.5, -0.5, -0.5] if zero == "weights" else other
    elif zero == "weights":
        expected = [-0.5 * value for value in other]
    else:
        expected = [value * (0.95 if "lars" in optimizer else 1.0) for value in other]
    assert end["dense.weight"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_step_changes_nothing_then_or_later(optimizer: str, clip: str) -> None:
    ends = []
    for bad_steps in (0, 1):
        weights = parameters(MANY)
        ours = build_optimizer(weights.items(), plan_of(optimizer, *WORDS, f"clip={clip}", shapes=MANY))
        for number, _ in enumerate(steps(weights, 4)):
            if number == 2:
                for _ in range(bad_steps):
                    good = {name: weight.grad for name, weight in weights.items()}
                    before = everything(weights, ours)
                    for value, name in ((math.inf, "conv.weight"), (math.nan, "head.bias"), (-math.inf, "norm.weight")):
                        broken = torch.ones_like(weights[name])
                        broken[0] = value
                        weights[name].grad = broken
                    take_step(ours, 0.1, 2.0, BAD)
                    assert all(torch.equal(now, before[name]) for name, now in everything(weights, ours).items())
                    assert all(weight.grad is None for weight in weights.values())
                    for name, weight in weights.items():
                        weight.grad = good[name]
            take_step(ours, 0.1, 2.0)
        ends.append(everything(weights, ours))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_without_a_gradient_moves_as_by_a_gradient_of_zero(optimizer: str, clip: str) -> None:
    ends = []
    for zero in (None, torch.zeros(3, 2, 2, 2, dtype=torch.float64)):
        weights = parameters(MANY)
        ours = build_optimizer(weights.items(), plan_of(optimizer, *WORDS, f"clip={clip}", shapes=MANY))
        for _ in steps(weights, 2):
            weights["again.weight"].grad = zero
            take_step(ours, 0.1, 2.0)
        ends.append(everything(weights, ours))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_only_good_steps_are_counted() -> None:
    weights = parameters()
    ours = build_optimizer(weights.items(), plan_of("{name: adamw, lr: 1}"))
    for (_, bad), count in zip(zip(steps(weights, 4), (GOOD, BAD, BAD, GOOD), strict=True), (1, 1, 1, 2), strict=True):
        take_step(ours, 0.1, 2.0, bad)
        assert int(ours.tensors()["good_steps"]) == count
    assert "good_steps" not in build_optimizer(weights.items(), plan_of("{name: lars, lr: 1}")).tensors()


def test_the_first_steps_of_adam_lose_no_digits_in_float32() -> None:
    weights = {"dense.bias": nn.Parameter(torch.zeros(2))}
    ours = build_optimizer(weights.items(), plan_of("{name: adamw, lr: 1, betas: [0.999, 0.99999]}"))
    weights["dense.bias"].grad = torch.tensor([3.0, -0.5])
    take_step(ours, 1.0, 1.0)
    assert weights["dense.bias"].tolist() == pytest.approx([-1, 1], rel=4e-7)


@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 3, 8), (2, 8, 3), (3, 1, 5), (3, 5, 1)])
def test_a_direction_is_made_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    stack = numbers("stack", shape)
    result = orthogonalize(stack, 12)
    assert result.shape == shape
    for before, after in zip(stack, result, strict=True):
        values = torch.linalg.svdvals(after)
        assert 0.65 < float(values.min()) <= float(values.max()) < 1.25
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        inner = left.mT @ after @ right.mT
        assert torch.allclose(inner, inner.diagonal().diag(), atol=1e-10)
    assert torch.allclose(orthogonalize(1000 * stack, 12), result, rtol=1e-9)
    assert torch.allclose(orthogonalize(stack.mT, 12), result.mT, rtol=1e-9)


def test_a_direction_of_zero_stays_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))
    assert torch.isfinite(orthogonalize(torch.full((1, 3, 4), 1e-30), 5)).all()


def test_what_muon_leaves_out_follows_the_schedule_of_its_peak() -> None:
    moved = []
    for peak, lr in ((0.5, 0.5), (0.5, 0.25), (0.125, 0.0625), (0.0, 0.0)):
        weights = {"norm.weight": nn.Parameter(torch.zeros(1, dtype=torch.float64))}
        plan = plan_of(f"{{name: muon, lr: {peak}, adamw_lr: 0.01}}", shapes={"norm.weight": (1,)})
        weights["norm.weight"].grad = torch.ones(1, dtype=torch.float64)
        take_step(build_optimizer(weights.items(), plan), lr, 1.0)
        moved.append(-float(weights["norm.weight"].detach()))
    assert moved == pytest.approx([0.01, 0.005, 0.005, 0.0], rel=1e-7)
