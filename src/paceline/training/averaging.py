"""Averages saved checkpoints, evaluates the result and stores it beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as safetensors_bytes

from paceline import checkpoint
from paceline.device import widest_float
from paceline.errors import Damaged, RunError
from paceline.job import Job
from paceline.optim.averages import StateDict, average_networks
from paceline.progress import Progress, progress_bar, silent
from paceline.record import Row, json_text, latest
from paceline.sink import open_sinks
from paceline.sink.bar import BarSink
from paceline.training.evaluate import evaluate, evaluate_network
from paceline.training.restore import give_network, load_checkpoint
from paceline.training.selection import steps_to_average
from paceline.training.session import Session, open_session

FOLDER, DESCRIPTION = "averaged", "average.json"


@dataclass(frozen=True)
class Method:
    """How checkpoints become one network."""

    decay: float | None = None
    """Exponential, in the order of time; None is the arithmetic mean."""
    recalibrate: int | None = None
    """Take running statistics from this many training images instead of averaging them too."""

    @property
    def name(self) -> str:
        """The word for it in records."""
        return "mean" if self.decay is None else "exponential"


@dataclass
class AveragedNetwork:
    """The average of the checkpoints of some steps; the first replica has it, the others know only the steps."""

    steps: list[int] = field(default_factory=list)
    tensors: StateDict = field(default_factory=dict)
    last: checkpoint.CheckpointFiles = field(default_factory=dict)
    """The files of the last checkpoint in it."""
    faults: list[Damaged] = field(default_factory=list)
    """What is wrong with the checkpoints that are not in it."""


def average_at_end(session: Session) -> None:
    """At the end of a run, average its last checkpoints if the recipe asks for it."""
    plan, world, run = session.plan, session.world, session.run
    if not plan.averaged_steps:
        return
    average = AveragedNetwork()
    if world.first:
        average = read_and_average(run.checkpoints, plan.averaged_steps, Method(), run.progress)
    for fault in average.faults:  # a damaged checkpoint does not fail a run at its end
        run.note(f"left out of the average: {fault}", warning=True)
    average.steps = world.broadcast_object(average.steps)
    if not average.steps:
        run.note("none of the checkpoints that the recipe averages is intact", warning=True)
        return
    last = [row["top1"] for row in latest(run.rows(), "validation") if row["step"] == plan.steps]
    evaluate_average(session, average, Method(), last[-1] if last else None)


def average_run(job: Job, folder: Path, last: int | None, method: Method) -> tuple[list[Row], list[str]]:
    """Evaluate the last checkpoint, then the average of all; gives both rows, and notes for people."""
    with (
        open_session(job.plan, folder, "append", data_folder=job.data_folder, launch=job.launch) as session,
        progress_bar(session.world.first) as show,
    ):
        average = AveragedNetwork()
        if session.world.first:
            session.run.sinks = [*open_sinks(job.plan, session.run), BarSink(show)]
            average = _average_checkpoints(folder, last, method, session.run.progress)
        average.steps = session.world.broadcast_object(average.steps)
        load_checkpoint(session, average.steps[-1], average.last if session.world.first else None)
        result = evaluate(session).row
        row = evaluate_average(session, average, method, result["top1"])
    name = "last, EMA" if result.get("averaged") else "last checkpoint"
    return [{"method": name, "steps": average.steps[-1:], **result}, row], [f"passed over: {f}" for f in average.faults]


def _average_checkpoints(folder: Path, last: int | None, method: Method, progress: Progress) -> AveragedNetwork:
    """Average the checkpoints; if a run that trains removes one of them meanwhile, they are chosen anew."""
    average = AveragedNetwork()
    for _ in range(checkpoint.ATTEMPTS):
        steps = steps_to_average(folder, last)
        average = read_and_average(folder / "checkpoints", steps, method, progress)
        missing = [step for step in steps if step not in average.steps]
        if not any(checkpoint.is_gone(folder / "checkpoints" / checkpoint.name_of(step)) for step in missing):
            break
    if not average.steps:
        raise RunError(f"{folder}: no checkpoint of a trained step is intact; continue with: paceline resume {folder}")
    return average


def read_and_average(folder: Path, steps: list[int], method: Method, progress: Progress = silent) -> AveragedNetwork:
    """Average the checkpoints of these steps, passing over damaged ones; each is read once."""
    average = AveragedNetwork()

    def networks() -> Iterator[StateDict]:
        for number, step in enumerate(steps):
            progress("averaging", number, len(steps))
            try:
                average.last = checkpoint.read(folder / checkpoint.name_of(step))
            except Damaged as fault:
                average.faults.append(fault)
            else:
                average.steps.append(step)
                yield tensors_from(average.last[checkpoint.NETWORK])
        progress("averaging", len(steps), len(steps))

    average.tensors = average_networks(networks(), method.decay)
    return average


def evaluate_average(session: Session, average: AveragedNetwork, method: Method, last_top1: float | None) -> Row:
    """Evaluate an average of checkpoints, and write it and a row of the record.

    The network of the session becomes the averaged one. The first replica has it and gives it to all.
    """
    plan, run = session.plan, session.run
    give_network(session, average.tensors, f"the {method.name} of checkpoints")
    step = average.steps[-1]
    images = recalibrate(session, method.recalibrate, step) if method.recalibrate else None
    start = time.perf_counter()
    result = evaluate_network(session).row
    row = {
        "step": step,
        "epoch": plan.epoch(step),
        "steps": average.steps,
        "method": method.name,
        "decay": method.decay,
        "recalibrated_images": images,
        **result,
        "last_top1": last_top1,
        "seconds": time.perf_counter() - start,
        "device": plan.placement.device,
        "precision": plan.placement.precision,
    }
    if run.writes:
        if images:
            average.tensors |= _running_statistics(session, average.tensors)
        description = json_text(row, indent=1).encode()
        files = {checkpoint.NETWORK: safetensors_bytes(average.tensors), DESCRIPTION: description}
        checkpoint.write_to(run.folder / FOLDER, step, files)
    run.write("average", **row)
    return row


@torch.no_grad()
def recalibrate(session: Session, images: int, start: int) -> int:
    """Measure running statistics anew: the mean over the norm groups of `images` images of the endless list, from
    where step `start` begins, rounded up to whole steps; gives how many images that are.

    Behind the checkpoints and not at the beginning, where images may have had another side than the weights know.
    """
    plan, world, network = session.plan, session.world, session.state.network
    steps = math.ceil(images / plan.global_batch)
    if not network.statistics.norms:
        raise RunError("this network has no running statistics that train; leave --recalibrate out")
    total = torch.zeros(network.statistics.width, dtype=widest_float(world.device), device=world.device)
    with closing(session.loader.training(start)) as batches:
        for _ in range(steps):
            network.forward_statistics([network.prepare(batch) for batch in next(batches)])
            total += network.statistics.pop()
    network.statistics.load(world.all_reduce(total) / (steps * plan.norm_total))
    return steps * plan.global_batch


def _running_statistics(session: Session, tensors: StateDict) -> StateDict:
    """The running statistics that are new, in the types they are stored in."""
    network = session.state.network
    norms = [name for name, module in network.module.named_modules() if module in network.statistics.norms]
    names = [f"{norm}.{which}" for norm in norms for which in ("running_mean", "running_var")]
    new = network.module.state_dict()
    return {name: new[name].to("cpu", tensors[name].dtype, copy=True) for name in names}
