"""Short trials of one plan on many layouts, each in its own processes, so that their runs can be compared."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import checkpoint
from paceline.data.index.fingerprint import data_digest
from paceline.errors import Broken
from paceline.files import write_whole
from paceline.launch import Launch
from paceline.model.metrics import TRAIN_SUMS
from paceline.planning import Plan
from paceline.training import lockstep
from paceline.training.differences import relative_difference, state_scales
from paceline.training.restore import restore_newest
from paceline.training.save import save
from paceline.training.session import Session, open_session
from paceline.training.step import take_step
from paceline.world import stand_by

TRIAL_TIMEOUT = 1800.0
"""Seconds after which a trial counts as hung."""
EXCHANGES = 7
"""How often replicas add up what is timed."""


@dataclass(frozen=True)
class Outcome:
    """What a trial leaves: the loss of each step, and every tensor of the network, the optimizer and the average."""

    losses: list[float]
    tensors: dict[str, Tensor]


class Trial:
    """A plan run for a few steps in a folder; it can be killed and resumed, on this or another plan."""

    def __init__(self, folder: Path, data: Path | None, steps: int, processes: int | None = None) -> None:
        self._folder, self._data, self._steps = folder, data, steps
        self._processes = processes
        """How many processes are started, where that is more than there is work for."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["paceline.training.trials", "paceline.model.staged"])

    def finish(self, plan: Plan) -> Outcome:
        """Run to the last step, from the beginning or from a checkpoint."""
        _wait_for(self._start(plan, partial(_train, self._folder, self._steps, saving=False)))
        losses = json.loads((self._folder / "losses.json").read_text())
        return Outcome([losses[str(s)] for s in range(1, self._steps + 1)], load_file(self._folder / "end.safetensors"))

    def lead(self, plan: Plan) -> lockstep.Lead:
        """Run to the last step in one process, and keep what others can follow step by step."""
        _wait_for(self._start(plan, partial(_lead, self._folder, self._steps)))
        return lockstep.read_lead(self._folder, self._steps, plan.global_batch)

    def follow(self, plan: Plan, leader: lockstep.Lead) -> lockstep.Differences:
        """Take the leader's steps, from the beginning or from a checkpoint, each from the leader's state."""
        _wait_for(self._start(plan, partial(_follow, self._folder, self._steps, leader.folder)))
        rows = [json.loads((self._folder / f"follow-{number}.json").read_text()) for number in range(plan.processes)]
        return lockstep.merge([{part: lockstep.Difference(*row[part]) for part in row} for row in rows])

    def first_loss_amplification(self, plan: Plan) -> float:
        """How many times the first loss multiplies rounding of the weights."""
        _wait_for(self._start(plan, partial(_measure, self._folder)))
        return float((self._folder / "amplification.json").read_text())

    def exchange_seconds(self, plan: Plan, size: int) -> float:
        """How long the replicas of a plan take to add up so many bytes, the median of several times."""
        _wait_for(self._start(plan, partial(_exchange, self._folder, size)))
        return float((self._folder / "exchange.json").read_text())

    def copy_to(self, folder: Path) -> None:
        """Leave in another folder what this trial has left so far."""
        shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def kill_after(self, plan: Plan, step: int) -> int:
        """Run, saving every step, and kill all processes once `step` is saved; gives the newest saved step."""
        processes = self._start(plan, partial(_train, self._folder, self._steps, saving=True))
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

    def _start(self, plan: Plan, task: Callable[[Session], None]) -> list[BaseProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes: list[BaseProcess] = []
        count = self._processes or plan.processes
        for rank in range(count):
            launch = Launch(rank, count, rank, count, "127.0.0.1", port, store_is_there=False)
            arguments = (plan, launch, self._folder, self._data, task)
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


def _run(plan: Plan, launch: Launch, folder: Path, data: Path | None, task: Callable[[Session], None]) -> None:
    """One replica of a trial, or a process that has no work."""
    if launch.rank >= plan.processes:
        stand_by(plan, launch, data_digest(plan.data, data))
        return
    with open_session(plan, folder, data_folder=data, launch=launch) as session:
        task(session)


def _train(folder: Path, steps: int, session: Session, *, saving: bool) -> None:
    """Train to the last step, and write down losses and the end."""
    restore_newest(session)
    state, first = session.state, session.world.first
    path, loss = folder / "losses.json", TRAIN_SUMS.index("loss")
    losses: dict[str, Any] = json.loads(path.read_text()) if path.is_file() and state.step else {}
    with closing(session.loader.training(state.step)) as batches:
        while state.step < steps:
            take_step(session, next(batches))
            losses[str(state.step)] = float(state.last_sums[loss]) / session.plan.global_batch
            if first:
                write_whole(path, json.dumps(losses))
            if saving:
                save(session)
    with state.gathered(keep=session.world.replica == 0):
        groups = state.network.gather(state.tensors())
        tensors = {
            f"{group}.{name}": tensor.detach().cpu().contiguous().clone()
            for group, members in groups.items()
            for name, tensor in members.items()
        }
    if first:
        save_file(tensors, folder / "end.safetensors")


def _lead(folder: Path, steps: int, session: Session) -> None:
    lockstep.lead(session, folder, steps)


def _measure(folder: Path, session: Session) -> None:
    write_whole(folder / "amplification.json", json.dumps(lockstep.first_loss_amplification(session)))


def _exchange(folder: Path, size: int, session: Session) -> None:
    world, seconds = session.world, []
    values = torch.zeros(size // 4, device=world.device)
    for _ in range(EXCHANGES):
        world.barrier()
        start = time.perf_counter()
        world.all_reduce(values)[0].item()
        seconds.append(time.perf_counter() - start)
    if world.first:
        write_whole(folder / "exchange.json", json.dumps(median(seconds)))


def _follow(folder: Path, steps: int, leader: Path, session: Session) -> None:
    differences = lockstep.follow(session, leader, steps)
    write_whole(folder / f"follow-{session.world.process}.json", json.dumps(differences))


def compare_outcomes(one: Outcome, other: Outcome) -> dict[str, float]:
    """The largest relative differences of two trials: losses, weights with optimizer state, running statistics."""
    loss = torch.tensor(one.losses, dtype=torch.float64), torch.tensor(other.losses, dtype=torch.float64)
    worst = {"loss": relative_difference(*loss), "weights": 0.0, "statistics": 0.0}
    scales = state_scales(one.tensors)
    for name, tensor in one.tensors.items():
        column = "statistics" if "running_" in name else "weights"
        worst[column] = max(worst[column], relative_difference(tensor, other.tensors[name], scales[name]))
    worst["first_loss"] = relative_difference(loss[0][:1], loss[1][:1])
    return worst
