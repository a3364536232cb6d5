"""Short trials of one plan on many layouts, each in its own processes, so that their runs can be compared."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import checkpoint
from paceline.errors import Broken
from paceline.files import write_whole
from paceline.launch import Launch
from paceline.model.metrics import TRAIN_SUMS
from paceline.planning import Plan
from paceline.training.restore import restore_newest
from paceline.training.save import save
from paceline.training.session import open_session
from paceline.training.step import take_step

TRIAL_TIMEOUT = 1800.0
"""Seconds after which a trial counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """What a trial leaves: the loss of each step, and every tensor of the network, the optimizer and the average."""

    losses: list[float]
    tensors: dict[str, Tensor]


class Trial:
    """A plan run for a few steps in a folder; it can be killed and resumed, on this or another plan."""

    def __init__(self, folder: Path, data: Path | None, steps: int) -> None:
        self._folder, self._data, self._steps = folder, data, steps
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["paceline.training.trials"])

    def finish(self, plan: Plan) -> Outcome:
        """Run to the last step, from the beginning or from a checkpoint."""
        _wait_for(self._start(plan, saving=False))
        losses = json.loads((self._folder / "losses.json").read_text())
        return Outcome([losses[str(s)] for s in range(1, self._steps + 1)], load_file(self._folder / "end.safetensors"))

    def kill_after(self, plan: Plan, step: int) -> int:
        """Run, saving every step, and kill all processes once `step` is saved; gives the newest saved step."""
        processes = self._start(plan, saving=True)
        end = time.monotonic() + TRIAL_TIMEOUT
        while max(checkpoint.saved_steps(self._folder / "checkpoints"), default=-1) < step:
            if any(process.exitcode is not None for process in processes) or time.monotonic() > end:
                _wait_for(processes)
                break
            time.sleep(0.005)
        for process in processes:
            process.kill()
            process.join()
        return max(checkpoint.saved_steps(self._folder / "checkpoints"))

    def _start(self, plan: Plan, saving: bool) -> list[BaseProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes: list[BaseProcess] = []
        for rank in range(plan.replicas):
            launch = Launch(rank, plan.replicas, rank, plan.replicas, "127.0.0.1", port, store_is_there=False)
            arguments = (plan, launch, self._folder, self._data, self._steps, saving)
            processes.append(self._context.Process(target=_run, args=arguments, daemon=True))
        for process in processes:
            process.start()
        return processes


def _wait_for(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(TRIAL_TIMEOUT)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            raise Broken(f"a trial process ended with status {process.exitcode}")


def _run(plan: Plan, launch: Launch, folder: Path, data: Path | None, steps: int, saving: bool) -> None:
    """One replica of a trial."""
    with open_session(plan, folder, data_folder=data, launch=launch) as session:
        restore_newest(session)
        state, first = session.state, session.world.first
        path, loss = folder / "losses.json", TRAIN_SUMS.index("loss")
        losses: dict[str, Any] = json.loads(path.read_text()) if path.is_file() and state.step else {}
        with closing(session.loader.training(state.step)) as batches:
            while state.step < steps:
                take_step(session, next(batches))
                losses[str(state.step)] = float(state.last_sums[loss]) / plan.global_batch
                if first:
                    write_whole(path, json.dumps(losses))
                if saving:
                    save(session)
        if first:
            tensors = {
                f"{group}.{name}": tensor.detach().cpu().contiguous().clone()
                for group, members in state.tensors().items()
                for name, tensor in members.items()
            }
            save_file(tensors, folder / "end.safetensors")


NEGLIGIBLE = 1e-13
"""A tensor with no number above this fraction of the largest of its kind is nothing but rounding, and is compared with
that largest: the bias of a convolution before a norm is one, whose gradient is zero."""


def relative_difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """The largest |a - b| over the largest |a|, or over `scale` if that is larger."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf  # what is not a number agrees with nothing
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max()) / max(_size(a), scale, 1e-300)


def compare_outcomes(one: Outcome, other: Outcome) -> dict[str, float]:
    """The largest relative differences of two trials: losses, weights with optimizer state, running statistics."""
    loss = torch.tensor(one.losses, dtype=torch.float64), torch.tensor(other.losses, dtype=torch.float64)
    worst = {"loss": relative_difference(*loss), "weights": 0.0, "statistics": 0.0}
    largest: dict[str, float] = {}
    for name, tensor in one.tensors.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(tensor))
    for name, tensor in one.tensors.items():
        column = "statistics" if "running_" in name else "weights"
        scale = largest[_kind(name)] if _size(tensor) <= NEGLIGIBLE * largest[_kind(name)] else 0.0
        if name.endswith("running_mean"):  # as exact as the numbers that it is the mean of, however near to zero
            variance = one.tensors.get(name.replace("running_mean", "running_var"))
            scale = scale if variance is None else math.sqrt(_size(variance))
        worst[column] = max(worst[column], relative_difference(tensor, other.tensors[name], scale))
    worst["first_loss"] = relative_difference(loss[0][:1], loss[1][:1])
    return worst


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max())


def _kind(name: str) -> str:
    """Running means, running variances, each state of the optimizer, or weights."""
    last = name.rpartition(".")[2]
    return "weight" if last == "bias" else last
