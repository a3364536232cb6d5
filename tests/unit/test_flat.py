"""Flat parameters: their memory, the state beside them, checkpoints, and what a step costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import make_plan, make_session
from optim_cases import CLIPS, MANY, OPTIMIZERS, numbers, parameters, plan_of, steps, take_step
from paceline.optim.build import build_optimizer, weight_roundings
from paceline.optim.flat import BLOCK, FlatParameters
from paceline.planning import Plan
from paceline.training import step as training_step
from paceline.training.restore import load_files
from paceline.training.save import to_files
from paceline.training.state import State, build_state, initialize_state
from paceline.world import World

CPU = torch.device("cpu")
FLAT = [optimizer for optimizer in OPTIMIZERS if "sgd" not in optimizer]


def test_weights_keep_their_values_and_lie_aligned_in_one_tensor() -> None:
    weights = parameters(MANY)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    flat = FlatParameters(weights)
    assert all(torch.equal(weight, before[name]) and weight.is_leaf for name, weight in weights.items())
    assert len({weight.untyped_storage().data_ptr() for weight in weights.values()}) == 1
    assert all(weight.storage_offset() % BLOCK == 0 for weight in weights.values())
    assert len({weight.storage_offset() for weight in weights.values()}) == len(weights)
    assert len(flat.weights) == sum(-(-weight.numel() // BLOCK) * BLOCK for weight in weights.values())


def test_gradients_are_gathered_multiplied_and_measured_parameter_by_parameter() -> None:
    weights = parameters(MANY)
    flat = FlatParameters(weights)
    for summed in steps(weights, 1):
        gradient = flat.pop_gradient()
        assert all(torch.equal(view, summed[name]) for name, view in flat.views(gradient).items())
        assert all(weight.grad is None for weight in weights.values())
        norms = dict(zip(flat.parameters, flat.norms(gradient).tolist(), strict=True))
        assert norms == pytest.approx({name: float(gradient.norm()) for name, gradient in summed.items()}, rel=1e-12)
        factors = {name: float(index) for index, name in enumerate(flat.parameters)}
        product = flat.views(flat.multiply(gradient, torch.tensor(list(factors.values()), dtype=torch.float64)))
        assert all(torch.equal(product[name], factors[name] * summed[name]) for name in MANY)


def test_equal_shapes_are_one_stack() -> None:
    shapes = {"a.weight": (3, 2, 2, 2), "b.weight": (9, 5), "c.weight": (3, 2, 2, 2), "d.weight": (5, 9)}
    weights = parameters(shapes)
    stacks = FlatParameters(weights).matrices(FlatParameters(weights).weights)
    assert [tuple(stack.shape) for stack in stacks] == [(2, 3, 8), (1, 5, 9), (1, 9, 5)]
    assert torch.equal(stacks[1][0], weights["d.weight"])
    for matrix, name in zip(stacks[0], ("a.weight", "c.weight"), strict=True):
        assert torch.equal(matrix, weights[name].permute(0, 2, 3, 1).reshape(3, 8))


@pytest.mark.parametrize("optimizer", FLAT)
def test_parameters_stay_views_and_convolutions_are_channels_last(optimizer: str) -> None:
    weights = parameters(MANY)
    ours = build_optimizer(weights.items(), plan_of(optimizer, shapes=MANY))
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    for _ in steps(weights, 2):
        take_step(ours, 0.1, 2.0)
    for name, tensor in (*weights.items(), *ours.tensors().items()):
        layout = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        assert tensor.is_contiguous(memory_format=layout)
        assert name not in addresses or tensor.data_ptr() == addresses[name]


def test_padding_stays_zero_whatever_the_rule() -> None:
    for optimizer in FLAT:
        weights = parameters(MANY)
        ours = build_optimizer(weights.items(), plan_of(optimizer, "weight_decay.rate=0.1", shapes=MANY))
        for _ in steps(weights, 3):
            take_step(ours, 0.1, 2.0)
        for group in ours._groups:  # type: ignore[attr-defined]
            inside = group.flat.full(0.0)
            for view in group.flat.views(inside).values():
                view.fill_(1.0)
            assert not group.flat.weights[inside == 0].any()


def test_a_state_dict_is_taken_up_in_place() -> None:
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 2)).double()
    saved = {name: numbers(name, tuple(old.shape)).to(old.dtype) for name, old in network.state_dict().items()}
    named = dict(network.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    ours = build_optimizer(named.items(), plan_of("{name: lars, lr: 1, trust_coefficient: 1}", shapes=shapes))
    network.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in network.state_dict().items())
    network(numbers("picture", (4, 3, 3, 3))).square().sum().backward()  # of a plain sum a norm leaves no gradient
    take_step(ours, 0.1, 4.0)
    after = network.state_dict()
    assert all(not torch.equal(after[name], saved[name]) for name in named if name != "0.bias")


@pytest.mark.parametrize("gradients", ["narrow", "wide"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_of_16_bits_are_moved_by_arithmetic_of_32(optimizer: str, kind: torch.dtype, gradients: str) -> None:
    """Norms keep 32 bits. A bound that clips nothing makes 32-bit sgd and momentum leave torch's fused kernel."""
    narrow = {name: nn.Parameter(w if "norm" in name else w.to(kind)) for name, w in floats().items()}
    for weight in narrow.values():
        weight.grad_dtype = torch.float32 if gradients == "wide" else weight.dtype
    wide = {name: nn.Parameter(weight.detach().float()) for name, weight in narrow.items()}
    nearest = ("weight_decay.rate=0.02", "on.stochastic_rounding=false")
    ours = build_optimizer(narrow.items(), plan_of(optimizer, *nearest, shapes=MANY))
    words = ("weight_decay.rate=0.02", "clip.value=1e4")
    theirs = build_optimizer(wide.items(), plan_of(optimizer, *words, shapes=MANY))
    for step in range(2):
        for name, weight in narrow.items():
            weight.grad = (7 * numbers(f"{name}/{step}", MANY[name])).to(weight.grad_dtype)
            wide[name].data.copy_(weight.detach())
            wide[name].grad = weight.grad.float()
        take_step(ours, 0.1, 48.0)
        take_step(theirs, 0.1, 48.0)
        for name, weight in wide.items():
            assert torch.equal(narrow[name], weight.to(narrow[name].dtype)), name
        for name, state in ours.tensors().items():
            assert state.dtype == torch.float32
            assert torch.equal(state, theirs.tensors()[name])


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.2}", "{name: muon, lr: 0.2}"])
def test_weights_that_a_stage_has_are_rounded_by_the_bits_that_they_have_in_the_whole_network(optimizer: str) -> None:
    words = ("weight_decay.rate=0.02", "clip.value=1e4")

    def half() -> dict[str, nn.Parameter]:
        narrow = {name: nn.Parameter(weight.to(torch.bfloat16)) for name, weight in floats().items()}
        for weight in narrow.values():
            weight.grad_dtype = torch.float32
        return narrow

    plan, whole, stage = plan_of(optimizer, *words, shapes=MANY), half(), half()
    roundings = weight_roundings(whole.items(), plan)
    del stage["conv.weight"], stage["norm.weight"], stage["dense.bias"]
    ours, part = build_optimizer(whole.items(), plan), build_optimizer(stage.items(), plan, roundings=roundings)
    for step in range(2):
        for named in (whole, stage):
            for name, weight in named.items():
                weight.grad = numbers(f"{name}/{step}", MANY[name]).float()
        take_step(ours, 0.1, 48.0)
        take_step(part, 0.1, 48.0)
    for name, weight in stage.items():
        assert torch.equal(weight, whole[name]), name


def floats() -> dict[str, Tensor]:
    return {name: weight.detach().float() for name, weight in parameters(MANY).items()}


class Kernels(TorchDispatchMode):
    """Counts the calls that do work; views only say where numbers are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "detach" not in str(function):
            self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", FLAT)
def test_a_step_takes_no_more_kernels_for_more_parameters(optimizer: str, clip: str) -> None:
    counts = []
    for copies in (2, 9):  # one of several heads decides between classes
        shapes = {f"{name.partition('.')[0]}.{copy}.{name}": s for copy in range(copies) for name, s in MANY.items()}
        weights = parameters(shapes)
        ours = build_optimizer(weights.items(), plan_of(optimizer, f"clip={clip}", shapes=shapes))
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)  # channels_last where the weight is, as in training
        with Kernels() as kernels:
            take_step(ours, 0.1, 2.0)
        counts.append(kernels.calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", FLAT)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_the_host_reads_no_number_in_a_step(optimizer: str, clip: str, kind: torch.dtype) -> None:
    """Tensors of the meta device have no numbers: reading one raises."""
    weights = {name: nn.Parameter(weight.detach().to("meta", kind)) for name, weight in parameters(MANY).items()}
    ours = build_optimizer(weights.items(), plan_of(optimizer, f"clip={clip}", "weight_decay.rate=0.1", shapes=MANY))
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    wide = torch.ones((), dtype=torch.float64, device="meta")
    ours.step(wide, wide, wide.float(), wide.long())
    assert all(weight.grad is None for weight in weights.values())


def advance(plan: Plan, state: State, count: int) -> dict[str, Tensor]:
    """Train for some steps; gives every tensor that is then there."""
    session = make_session(plan, state=state)
    shares = session.loader.training(state.step)
    for _ in range(count):
        training_step.take_step(session, next(shares))
    shares.close()
    named = dict(state.network.module.state_dict()) | state.optimizer.tensors()
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o.count(",") < 3])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(optimizer: str) -> None:
    plan = make_plan(f"optimizer={optimizer}", "optimizer.lr=0.01", "weight_decay.rate=0.01", "clip.adaptive=0.05")
    state = build_state(plan, World(CPU))
    initialize_state(state, plan)
    saved = advance(plan, state, 2)
    files = to_files(state)
    other = load_files(build_state(plan, World(CPU)), files, "here")
    restored = dict(other.network.module.state_dict()) | other.optimizer.tensors()
    assert restored.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.items())
    one, two = advance(plan, state, 2), advance(plan, other, 2)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in one.items())
    assert all(tensor.isfinite().all() for tensor in one.values())


def test_norms_of_many_numbers_keep_their_digits_in_float32() -> None:
    many = numbers("many", (1 << 22,))
    flat = FlatParameters({"many": nn.Parameter(many.float()), "few": nn.Parameter(torch.full((5,), 3.0))})
    assert flat.norms(flat.weights).tolist() == pytest.approx([3 * 5**0.5, float(many.norm())], rel=1e-6)
