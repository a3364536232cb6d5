"""Optimizer state on the host of an accelerator: the same bits, no step that waits, less memory, the same files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conftest import make_plan
from optim_cases import OPTIMIZERS, plan_of
from paceline.optim import build
from paceline.optim.build import build_optimizer
from paceline.optim.offload import PIECE_BYTES, HostGroup
from paceline.optim.rule import FlatOptimizer
from paceline.planning import Plan
from paceline.training.restore import load_files, restore_newest
from paceline.training.save import to_files
from paceline.training.session import open_session
from paceline.training.state import State, build_state
from paceline.training.step import take_step
from paceline.world import World

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
STEPS = 5
PLAIN = ("on.device=cuda", "on.micro_batch=16", "on.graphs=false", "on.deterministic=true", "optimizer.lr=0.01")
OFFLOAD = "on.offload=optimizer"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many pieces that copies come and go beside the updates."""
    monkeypatch.setattr(build, "PIECE_BYTES", 20_000)


def run(plan: Plan, folder: Path, waits: str = "default") -> State:
    """A few steps; after the first, which sets things up, waiting for the device is as `waits` says."""
    with open_session(plan, folder) as session, closing(session.loader.training(0)) as steps:
        restore_newest(session)
        try:
            for _ in range(STEPS):
                batches = next(steps)
                torch.cuda.set_sync_debug_mode(waits if session.state.step else "default")
                take_step(session, batches)
                torch.cuda.set_sync_debug_mode("default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return session.state


def numbers(state: State) -> dict[str, Tensor]:
    groups = state.tensors().items()
    return {f"{group}/{name}": tensor.cpu() for group, tensors in groups for name, tensor in tensors.items()}


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", ["{}", "{value: 0.5, norm: 0.7, adaptive: 0.1}"], ids=["free", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("small_pieces")
def test_state_on_the_host_changes_no_bit(tmp_path: Path, optimizer: str, clip: str, weights: str) -> None:
    words = (f"optimizer={optimizer}", f"clip={clip}", "ema={decay: 0.9}", f"on.weights={weights}", *PLAIN)
    ends = []
    for name, more in (("here", ()), ("there", (OFFLOAD,))):
        (tmp_path / name).mkdir()
        ends.append(numbers(run(make_plan(*words, "on.precision=bf16", *more), tmp_path / name)))
    here, there = ends
    assert here.keys() == there.keys()
    assert [name for name, values in here.items() if not torch.equal(values, there[name])] == []


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.1, momentum: 0.9}", "{name: lamb, lr: 1}"])
@pytest.mark.usefixtures("small_pieces")
def test_no_step_waits_for_the_device(tmp_path: Path, optimizer: str) -> None:
    state = run(make_plan(f"optimizer={optimizer}", *PLAIN, OFFLOAD), tmp_path, waits="error")
    assert isinstance(state.optimizer, FlatOptimizer)
    groups = [group for group in state.optimizer._groups if isinstance(group, HostGroup)]
    assert len(groups) > 3
    assert all(values.is_pinned() for group in groups for values in group.state.values())


@pytest.mark.usefixtures("small_pieces")
def test_checkpoints_of_state_on_the_host_are_those_of_state_on_the_device(tmp_path: Path) -> None:
    plans = [make_plan("optimizer={name: adamw, lr: 0.1}", *PLAIN, *more) for more in ((OFFLOAD,), ())]
    state = run(plans[0], tmp_path)
    files = to_files(state)
    other = load_files(build_state(plans[1], World(torch.device("cuda", 0))), files, "here")
    again = load_files(build_state(plans[0], World(torch.device("cuda", 0))), to_files(other), "there")
    assert to_files(other) == files == to_files(again)


def test_the_device_keeps_room_for_two_pieces_only() -> None:
    shapes = {f"{index}.weight": (512, 512, 3, 3) for index in range(16)}
    kept = []
    for offload in ("none", "optimizer"):
        plan = plan_of("{name: adamw, lr: 0.1}", shapes=shapes)
        placement = plan.placement.model_copy(update={"offload": offload})
        weights = {name: nn.Parameter(torch.zeros(shape, device="cuda")) for name, shape in shapes.items()}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        changed = Plan(plan.recipe, placement, plan.network)
        optimizer = build_optimizer(weights.items(), changed)
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        bad, step = torch.zeros((), device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
        lr, divisor = torch.ones(2, dtype=torch.float64, device="cuda")
        optimizer.step(lr, divisor, bad, step)
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        del weights, optimizer
    state, piece = 2 * 4 * 16 * 512 * 512 * 9, 2 * 4 * 512 * 512 * 9
    assert piece > PIECE_BYTES
    assert kept[0] - kept[1] > state - 3 * piece
