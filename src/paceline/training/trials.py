"""Short trials of one plan on many layouts, each in processes of its own, so that their runs can be compared."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import checkpoint
from paceline.data.load.loader import open_loader
from paceline.errors import Broken
from paceline.launch import Launch
from paceline.planning import Plan
from paceline.record import Run
from paceline.training.loop import update
from paceline.training.save import save
from paceline.training.session import settle_torch, take_up
from paceline.world import init_world

PATIENCE = 1800.0
"""Seconds after which a trial counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """What a trial leaves: the loss of each step, and every tensor of the network, the optimizer and the average."""

    losses: list[float]
    tensors: dict[str, Tensor]


class Trial:
    """A plan run for a few steps in a folder; it can be killed and taken up again, on this or another plan."""

    def __init__(self, folder: Path, data: Path | None, steps: int) -> None:
        self._folder, self._data, self._steps = folder, data, steps
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["paceline.training.trials"])

    def finish(self, plan: Plan) -> Outcome:
        """Run to the last step, from the beginning or from what is saved."""
        _wait_for(self._start(plan, saving=False))
        losses = json.loads((self._folder / "losses.json").read_text())
        return Outcome([losses[str(s)] for s in range(1, self._steps + 1)], load_file(self._folder / "end.safetensors"))

    def kill_after(self, plan: Plan, step: int) -> int:
        """Run, saving every step, and kill all processes once `step` is saved; gives the newest saved step."""
        crew = self._start(plan, saving=True)
        end = time.monotonic() + PATIENCE
        while max(checkpoint.saved_steps(self._folder / "checkpoints"), default=-1) < step:
            if any(process.exitcode is not None for process in crew) or time.monotonic() > end:
                _wait_for(crew)
                break
            time.sleep(0.005)
        for process in crew:
            process.kill()
            process.join()
        return max(checkpoint.saved_steps(self._folder / "checkpoints"))

    def _start(self, plan: Plan, saving: bool) -> list[BaseProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        crew: list[BaseProcess] = []
        for rank in range(plan.replicas):
            launch = Launch(rank, plan.replicas, rank, plan.replicas, "127.0.0.1", port, store_is_there=False)
            work = (plan, launch, self._folder, self._data, self._steps, saving)
            crew.append(self._context.Process(target=_run, args=work, daemon=True))
        for process in crew:
            process.start()
        return crew


def _wait_for(crew: list[BaseProcess]) -> None:
    for process in crew:
        process.join(PATIENCE)
        if process.exitcode != 0:
            for other in crew:
                other.kill()
            raise Broken(f"a trial process ended with status {process.exitcode}")


def _run(plan: Plan, launch: Launch, folder: Path, data: Path | None, steps: int, saving: bool) -> None:
    """One replica of a trial."""
    settle_torch(plan)
    world = init_world(plan, launch)
    run = Run(folder, writer=world.first)
    state = take_up(plan, world, run)
    loader = open_loader(plan, data, world.replica, world.device)
    shares = loader.training(state.step)
    path = folder / "losses.json"
    losses: dict[str, Any] = json.loads(path.read_text()) if path.is_file() and state.step else {}
    while state.step < steps:
        update(plan, state, next(shares))
        losses[str(state.step)] = float(state.last[0]) / plan.global_batch
        if world.first:
            _write_whole(path, losses)
        if saving:
            save(plan, run, state)
    shares.close()
    if world.first:
        average = state.average.tensors() if state.average else {}
        tensors = {**state.network.module.state_dict(), **state.optimizer.tensors()}
        tensors |= {f"average.{name}": tensor for name, tensor in average.items()}
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            folder / "end.safetensors",
        )
    world.close()


def _write_whole(path: Path, losses: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(losses))
    part.replace(path)


NEGLIGIBLE = 1e-13
"""A tensor with no number above this share of the largest of its kind is nothing but rounding, and is measured against
that largest: the bias of a convolution before a norm is one, whose gradient is zero."""


def difference(a: Tensor, b: Tensor, beside: float = 0.0) -> float:
    """The largest |a - b| over the largest |a|, or over what they stand `beside` where that is more."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf  # what is not a number agrees with nothing
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max()) / max(_size(a), beside, 1e-300)


def differences(one: Outcome, other: Outcome) -> dict[str, float]:
    """The largest relative differences of two trials: losses, weights with optimizer state, running statistics."""
    loss = torch.tensor(one.losses, dtype=torch.float64), torch.tensor(other.losses, dtype=torch.float64)
    worst = {"loss": difference(*loss), "weights": 0.0, "statistics": 0.0}
    largest: dict[str, float] = {}
    for name, tensor in one.tensors.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(tensor))
    for name, tensor in one.tensors.items():
        part = "statistics" if "running_" in name else "weights"
        beside = largest[_kind(name)] if _size(tensor) <= NEGLIGIBLE * largest[_kind(name)] else 0.0
        if name.endswith("running_mean"):  # as exact as the numbers that it is the mean of, however near to zero
            variance = one.tensors.get(name.replace("running_mean", "running_var"))
            beside = beside if variance is None else math.sqrt(_size(variance))
        worst[part] = max(worst[part], difference(tensor, other.tensors[name], beside))
    worst["first_loss"] = difference(loss[0][:1], loss[1][:1])
    return worst


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max())


def _kind(name: str) -> str:
    """Running means, running variances, each state of the optimizer, or weights."""
    last = name.rpartition(".")[2]
    return "weight" if last == "bias" else last
