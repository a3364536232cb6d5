"""Averages of saved checkpoints: made, judged, and put beside them as a network of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to

from paceline import checkpoint
from paceline.data.load.batches import Loader
from paceline.errors import RunError
from paceline.model.whole import exact
from paceline.optim.averages import StateDict, average_networks
from paceline.planning import Plan
from paceline.record import Row, Run, json_text, latest
from paceline.training.evaluate import evaluate
from paceline.training.restore import Saved
from paceline.training.state import State, set_network
from paceline.world import World

FOLDER, HOW = "averaged", "average.json"


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
class Blended:
    """What the checkpoints of some steps have become; the first replica has it, the others know the steps alone."""

    steps: list[int] = field(default_factory=list)
    network: StateDict = field(default_factory=dict)
    last: Saved = field(default_factory=dict)
    """The last checkpoint that is in it."""
    faults: list[RunError] = field(default_factory=list)
    """What is wrong with those that are not in it."""


def conclude(plan: Plan, world: World, run: Run, state: State, loader: Loader) -> None:
    """The end of a run: the mean of its last checkpoints, where the recipe asks for one."""
    if not plan.averaged_steps:
        return
    made = read_and_blend(run, plan.averaged_steps, Method()) if world.first else Blended()
    for fault in made.faults:  # a run does not fail at its end for a checkpoint that is damaged
        run.log(f"left out of the average: {fault}")
    made.steps = world.broadcast_object(made.steps)
    if not made.steps:
        run.log("none of the checkpoints that the recipe averages is whole")
        return
    judged = [row["top1"] for row in latest(run.rows(), "validation") if row["step"] == plan.steps]
    average(plan, world, run, state, loader, made, Method(), judged[-1] if judged else None)


def read_and_blend(run: Run, steps: list[int], method: Method) -> Blended:
    """One network of the checkpoints of these steps, passing over what cannot be read; each is read once."""
    made = Blended()

    def networks() -> Iterator[StateDict]:
        for step in steps:
            try:
                made.last = checkpoint.read(run.checkpoints / checkpoint.name_of(step))
            except RunError as fault:
                made.faults.append(fault)
            else:
                made.steps.append(step)
                yield tensors_from(made.last[checkpoint.NETWORK])

    made.network = average_networks(networks(), method.decay)
    return made


def average(
    plan: Plan, world: World, run: Run, state: State, loader: Loader, made: Blended, method: Method,
    last_top1: float | None,
) -> Row:  # fmt: skip
    """Judge an average of checkpoints, and write it and a row of the record.

    The network of `state` becomes the averaged one. The first replica has it and gives it to all.
    """
    if world.first:
        set_network(state, made.network, f"the {method.name} of checkpoints")
    world.broadcast(list(state.network.module.state_dict().values()))
    steps = made.steps
    seen = recalibrate(plan, world, state, loader, method.recalibrate, steps[-1]) if method.recalibrate else None
    start = time.perf_counter()
    found = evaluate(plan, world, state.network, loader)
    row = {
        "step": steps[-1],
        "epoch": plan.epoch(steps[-1]),
        "steps": steps,
        "method": method.name,
        "decay": method.decay,
        "recalibrated_images": seen,
        **found,
        "last_top1": last_top1,
        "seconds": time.perf_counter() - start,
        "device": plan.placement.device,
        "precision": plan.placement.precision,
    }
    if run.writer:
        if seen:
            made.network |= _statistics(state, made.network)
        files = {checkpoint.NETWORK: tensors_to(made.network), HOW: json_text(row, indent=1).encode()}
        checkpoint.write_at(run.folder / FOLDER, steps[-1], files)
    return run.write("average", **row)


@torch.no_grad()
def recalibrate(plan: Plan, world: World, state: State, loader: Loader, images: int, start: int) -> int:
    """Running statistics anew: the mean over the norm groups of `images` of the endless list, from where step `start`
    begins, rounded up to whole steps; gives how many that are.

    Behind the checkpoints and not at the beginning, where image sides may have been others than the weights know.
    """
    network, steps = state.network, math.ceil(images / plan.global_batch)
    if not network.statistics.norms:
        raise RunError("this network has no running statistics that train; leave --recalibrate out")
    total = torch.zeros(network.statistics.width, dtype=exact(world.device), device=world.device)
    with closing(loader.training(start)) as shares:
        for _ in range(steps):
            network.look(next(shares))
            total += network.statistics.take_away()
    network.statistics.put(world.all_reduce(total) / (steps * plan.norm_total))
    return steps * plan.global_batch


def _statistics(state: State, made: StateDict) -> StateDict:
    """The running statistics that are new, in the types they are stored in."""
    norms = [name for name, part in state.network.module.named_modules() if part in state.network.statistics.norms]
    names = [f"{norm}.{which}" for norm in norms for which in ("running_mean", "running_var")]
    new = state.network.module.state_dict()
    return {name: new[name].to("cpu", made[name].dtype, copy=True) for name in names}
