"""Optimizers on an accelerator: the host's numbers, no step that waits for the device, and steps in a CUDA graph."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from conftest import make_plan
from optim_cases import CLIPS, MANY, OPTIMIZERS, RATES, everything, numbers, parameters, plan_of
from paceline.optim.build import build_optimizer
from paceline.planning import Plan
from paceline.training.restore import restore_newest
from paceline.training.session import open_session
from paceline.training.state import State
from paceline.training.step import take_step

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
STEPS = 4
PLAIN = ("on.micro_batch=16", "on.compile=false")
"""Compiling the network would take a quarter of a minute each time."""


def run(plan: Plan, folder: pytest.TempPathFactory, waits: str = "default") -> State:
    """A few steps; after the first, which may set things up, waiting for the device is as `waits` says."""
    with open_session(plan, folder.mktemp("run")) as session, closing(session.loader.training(0)) as steps:
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


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_takes_the_host_s_steps(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, clip: str
) -> None:
    words = (f"optimizer={optimizer}", "optimizer.lr=0.01", f"clip={clip}", "on.precision=fp64", *PLAIN)
    ends = []
    for device in ("cpu", "cuda"):
        state = run(make_plan(*words, f"on.device={device}"), tmp_path_factory)
        ends.append({name: tensor.cpu() for name, tensor in state.network.module.state_dict().items()})
    for name, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][name], rtol=1e-7, atol=1e-7), name


@pytest.mark.parametrize(("precision", "weights"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
@pytest.mark.parametrize(
    "optimizer", ["{name: sgd, lr: 0.1, momentum: 0.9}", "{name: lars, lr: 1}", "{name: muon, lr: 0.01}"]
)
def test_no_step_waits_for_the_device(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, precision: str, weights: str
) -> None:
    words = (
        f"optimizer={optimizer}",
        f"clip={CLIPS[1]}",
        "mix.mixup=0.2",
        "ema={decay: 0.9}",
        f"on.precision={precision}",
        f"on.weights={weights}",
        "on.device=cuda",
        *PLAIN,
    )
    state = run(make_plan(*words), tmp_path_factory, waits="error")
    assert state.step == STEPS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_cuda_graph_holds_a_step(optimizer: str, clip: str, dtype: torch.dtype) -> None:
    ends = []
    for captured in (False, True):
        weights = {name: nn.Parameter(p.detach().to("cuda", dtype)) for name, p in parameters(MANY).items()}
        ours = build_optimizer(weights.items(), plan_of(optimizer, f"clip={clip}", "lr_factors.conv=0.5", shapes=MANY))
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        lr, divisor = torch.full((2,), 4.0, dtype=torch.float64, device="cuda")
        bad, step = torch.ones((), device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

        def take() -> None:
            for name, weight in weights.items():  # noqa: B023
                weight.grad = gradients[name]  # noqa: B023
            ours.step(lr, divisor, bad, step)  # noqa: B023

        take()  # a bad step: it only sets things up
        replay = take
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take()
            replay = graph.replay
        for index, rate in enumerate(RATES):
            lr.fill_(rate)
            bad.fill_(float(index == 3))
            step.fill_(index)
            for name, gradient in gradients.items():
                gradient.copy_(numbers(f"{name}/{index}", MANY[name]))
            replay()
        ends.append(everything(weights, ours))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    start = parameters(MANY)
    assert any(not torch.equal(ends[0][name].cpu(), weight.to(dtype)) for name, weight in start.items())
