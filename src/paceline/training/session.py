"""A session is a run that is open: torch's settings, the other replicas, the data, the state and the record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.binding import bound
from paceline.data.index.fingerprint import data_digest
from paceline.data.load.class_weights import class_weights
from paceline.data.load.later_stage import LaterStageLoader
from paceline.data.load.loader import Loader, open_loader
from paceline.data.load.workers import quick_switches
from paceline.device import load_programs_one_by_one, pci_address, widest_float
from paceline.launch import Launch
from paceline.planning import Plan
from paceline.record import Mode, Run
from paceline.settings.placement import Placement
from paceline.training.gradients import GradientNorm, GradientReader
from paceline.training.histograms import StepHistograms
from paceline.training.requests import Requests, Signals
from paceline.training.state import State, build_state
from paceline.world import World, init_world

if TYPE_CHECKING:
    from paceline.training.graphs import StepGraphs
    from paceline.training.saver import Saver


class StepInputs:
    """The numbers that the host sets for each step, as tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.lr = torch.zeros((), dtype=widest_float(device), device=device)
        self.index = torch.zeros((), dtype=torch.int64, device=device)

    def set(self, lr: float, index: int) -> None:
        """Set the learning rate and the number of the step, counted from 0, without waiting for the device."""
        self.lr.fill_(lr)
        self.index.fill_(index)


@dataclass
class Session:
    """What train, validate, average, replay, verify and bench are functions of."""

    plan: Plan
    world: World
    run: Run
    requests: Requests
    data_folder: Path | None = None
    quarantine: Path | None = None
    """The folder that lists images which cannot be decoded; None lists them nowhere."""
    graphs: StepGraphs | None = None
    """Recorded steps, once there are any."""
    saver: Saver | None = None
    """Writes checkpoints, once there are any."""

    @cached_property
    def state(self) -> State:
        """The state of the run, its weights not yet set."""
        weights = class_weights(self.plan, self.data_folder)
        return build_state(self.plan, self.world, [*weights.values()] if weights else None)

    def is_done(self) -> bool:
        """Whether the run has come to its end: its last step, or a validation that ended it."""
        return self.state.step >= self.plan.steps or self.state.stopping.reason is not None

    def finish_writing(self) -> None:
        """Wait until every checkpoint that was begun is on disk, or has failed to get there."""
        if self.saver is not None:
            self.saver.join()

    @cached_property
    def inputs(self) -> StepInputs:
        """What the host sets for each step."""
        return StepInputs(self.world.device)

    @cached_property
    def gradient_norm(self) -> GradientNorm:
        """The norm of a step's gradient, where a report may tell it."""
        return GradientNorm(self.plan, self.state.network, self.world)

    @cached_property
    def histograms(self) -> StepHistograms | None:
        """Histograms of weights and gradients, where the placement asks for any."""
        return StepHistograms(self.plan, self.state.network, self.world.device) if self.plan.histograms else None

    @property
    def gradient_readers(self) -> list[GradientReader]:
        """Everything that is computed from the gradients of some steps, for people."""
        return [self.gradient_norm, *([self.histograms] if self.histograms else [])]

    @property
    def wanted_readers(self) -> list[GradientReader]:
        """Those that the next step is asked for."""
        return [reader for reader in self.gradient_readers if reader.is_wanted(self.state.step + 1)]

    @cached_property
    def loader(self) -> Loader:
        """Where this replica gets its images."""
        world, share = self.world, partial(self.world.first_on_host, "cache")
        if world.stage > 0:
            return LaterStageLoader(self.plan, world.replica, world.device)
        return open_loader(self.plan, self.data_folder, world.replica, world.device, self.quarantine, share)


@contextmanager
def open_session(
    plan: Plan,
    folder: Path,
    mode: Mode = "own",
    *,
    data_folder: Path | None = None,
    launch: Launch | None = None,
    quarantine: Path | None = None,
    signals: bool = False,
) -> Iterator[Session]:
    """Open a run folder on this process's place in the world; leaving restores the process as it was.

    With `signals`, those that ask to stop and `on.time_limit` become requests to stop after a step.
    """
    with ExitStack() as stack:
        stack.enter_context(torch_settings(plan.placement))
        stack.enter_context(quick_switches())
        several = launch is not None and launch.count > 1
        world = init_world(plan, launch, data_digest(plan.data, data_folder) if several else "")
        if world.device.type == "cuda":
            load_programs_one_by_one()
        stack.enter_context(memory_limit(plan.placement, world.device))
        stack.enter_context(bound(plan.placement.bind, launch, pci_address(world.device)))
        run = stack.enter_context(Run(folder, mode if world.first else "read"))
        limit = plan.placement.time_limit.seconds if signals and plan.placement.time_limit else None
        heard = Signals(partial(run.progress, "stopping", 0, 1), limit)
        if signals:
            stack.enter_context(heard)
        requests = Requests(
            world,
            heard,
            save_seconds=plan.placement.save.seconds,
            report_seconds=plan.recipe.report.seconds,
            most_seconds=limit,
        )
        session = Session(plan, world, run, requests, data_folder, quarantine)
        stack.callback(session.finish_writing)  # before another process may own the folder
        yield session
        requests.drain()
        # Only after a good end: when one replica fails, the others may never come to a barrier.
        world.barrier()  # a launcher may stop the others once one has left, and the first may still be writing
        world.close()


@contextmanager
def memory_limit(placement: Placement, device: torch.device) -> Iterator[None]:
    """Let torch take no more of a CUDA device's memory than the placement allows, if it says so."""
    if device.type != "cuda" or "memory" not in placement.model_fields_set:
        yield
        return
    assert isinstance(placement.memory, int)
    there = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, placement.memory / there), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def torch_settings(placement: Placement) -> Iterator[None]:
    """Threads, TF32, sums in float16 and determinism of this process, as the placement says; restored on leaving."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    summed_in_fp16 = matmul.allow_fp16_accumulation
    was_deterministic, workspace = torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG"
    had_workspace = workspace in os.environ
    assert isinstance(placement.cpu_threads, int)
    torch.set_num_threads(placement.cpu_threads)
    matmul.allow_tf32 = cudnn.allow_tf32 = placement.precision == "tf32"
    matmul.allow_fp16_accumulation = placement.fp16_accumulation
    cudnn.benchmark = not placement.deterministic
    if placement.deterministic:
        os.environ.setdefault(workspace, ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        threads, matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
        matmul.allow_fp16_accumulation = summed_in_fp16
        torch.set_num_threads(threads)
        if placement.deterministic:  # this call loads torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(was_deterministic)
        if not had_workspace:
            os.environ.pop(workspace, None)
