"""Averages of saved checkpoints: made, judged, and put beside them as a network of its own."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from dataclasses import dataclass

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to

from paceline import checkpoint
from paceline.data.batches import Loader
from paceline.errors import RunError
from paceline.model.whole import exact
from paceline.optim.average import Tensors, blend
from paceline.plan import Plan
from paceline.record import Row, Run, latest
from paceline.train.evaluate import evaluate
from paceline.train.state import State, set_network
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


def conclude(plan: Plan, world: World, run: Run, state: State, loader: Loader) -> None:
    """The end of a run: the mean of its last checkpoints, where the recipe asks for one."""
    if not plan.averaged_steps:
        return
    steps = world.agree(_whole(run, plan.averaged_steps) if world.first else [])
    if not steps:
        run.log("none of the checkpoints that the recipe averages is whole")
        return
    judged = [row["top1"] for row in latest(run.rows(), "validation") if row["step"] == plan.steps]
    average(plan, world, run, state, loader, steps, Method(), judged[-1] if judged else None)


def average(
    plan: Plan, world: World, run: Run, state: State, loader: Loader, steps: list[int], method: Method,
    last_top1: float | None,
) -> Row:  # fmt: skip
    """Average the checkpoints of these steps, judge the outcome, and write it and a row of the record.

    The network of `state` becomes the averaged one. The first replica reads and gives it to all.
    """
    made: Tensors = {}
    if world.first:
        made = blend((_network(run, step) for step in steps), method.decay)
        set_network(state, made, f"the {method.name} of {len(steps)} checkpoints")
    world.spread(list(state.network.module.state_dict().values()))
    seen = recalibrate(plan, world, state, loader, method.recalibrate) if method.recalibrate else None
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
            made |= _statistics(state, made)
        files = {checkpoint.NETWORK: tensors_to(made), HOW: json.dumps(row, indent=1).encode()}
        checkpoint.write_at(run.folder / FOLDER, steps[-1], files)
    return run.write("average", **row)


@torch.no_grad()
def recalibrate(plan: Plan, world: World, state: State, loader: Loader, images: int) -> int:
    """Running statistics anew: the mean over the norm groups of the first `images` of the endless list, rounded up to
    whole steps; gives how many that are."""
    network, steps = state.network, math.ceil(images / plan.global_batch)
    if not network.statistics.norms:
        raise RunError("this network has no running statistics that train; leave --recalibrate out")
    total = torch.zeros(network.statistics.width, dtype=exact(world.device), device=world.device)
    with closing(loader.training(0)) as shares:
        for _ in range(steps):
            network.look(next(shares))
            total += network.statistics.take_away()
    network.statistics.put(world.sum(total) / (steps * plan.norm_total))
    return steps * plan.global_batch


def _whole(run: Run, steps: list[int]) -> list[int]:
    """Those of the steps whose checkpoints are there and undamaged: a run does not fail for the others at its end."""
    found = []
    for step in steps:
        try:
            checkpoint.read(run.checkpoints / checkpoint.name_of(step))
        except RunError as fault:
            run.log(f"left out of the average: {fault}")
        else:
            found.append(step)
    return found


def _network(run: Run, step: int) -> Tensors:
    return tensors_from(checkpoint.read(run.checkpoints / checkpoint.name_of(step))[checkpoint.NETWORK])


def _statistics(state: State, made: Tensors) -> Tensors:
    """The running statistics that are new, in the types they are stored in."""
    norms = [name for name, part in state.network.module.named_modules() if part in state.network.statistics.norms]
    names = [f"{norm}.{which}" for norm in norms for which in ("running_mean", "running_var")]
    new = state.network.module.state_dict()
    return {name: new[name].to("cpu", made[name].dtype, copy=True) for name in names}
