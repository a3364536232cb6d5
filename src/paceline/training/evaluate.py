"""Accuracy over the whole validation set: every image once, whatever the number of replicas, and counted."""

from __future__ import annotations

from contextlib import closing

import torch

from paceline.data.load.batches import Loader
from paceline.model.whole import JUDGMENT, Whole, exact
from paceline.planning import Plan
from paceline.record import Run
from paceline.sink import Sink
from paceline.training.requests import Requests, Stopped
from paceline.training.state import State
from paceline.world import World

Judgment = dict[str, float | int]
"""Loss, shares of right answers and the number of images that they are of."""


def judge(
    plan: Plan, world: World, state: State, loader: Loader, sink: Sink | None = None, requests: Requests | None = None
) -> Judgment:
    """Accuracy of what a run has made so far: its averaged weights where there is an average, else its weights."""
    if state.average is None:
        return evaluate(plan, world, state.network, loader, sink, requests)
    if not state.average.started(state.step):
        return evaluate(plan, world, state.network, loader, sink, requests) | {"averaged": False}
    with state.average.swapped_in():
        return evaluate(plan, world, state.network, loader, sink, requests) | {"averaged": True}


def owes_judgment(plan: Plan, world: World, run: Run, step: int) -> bool:
    """Whether a run ended between a step and the validation that was due after it."""
    rhythm = plan.rhythm(plan.recipe.evaluate.every, plan.recipe.evaluate.offset)
    due = step == plan.steps or rhythm.due(step)
    known = any(row["step"] == step for row in run.rows() if row["kind"] == "validation")
    return world.broadcast_object(due and not known)


def evaluate(
    plan: Plan, world: World, network: Whole, loader: Loader, sink: Sink | None = None, requests: Requests | None = None
) -> Judgment:
    """Mean loss, top-1 and top-5 accuracy of the network as it is; Stopped where a signal comes before the end."""
    sums = torch.zeros(len(JUDGMENT) + 1, dtype=exact(world.device), device=world.device)
    seen = 0
    with closing(loader.validation()) as batches:
        for batch in batches:
            if requests and requests.urgent:
                sums[-1] = 1  # the others hear of it with the sums, when they come to the end or leave too
                break
            sums[:-1] += network.judge(batch)
            seen += batch.count
            if sink:
                sink.judged(min(seen * world.replicas, plan.facts.validation_images))
    loss, top1, top5, images, stopped = world.all_reduce(sums).tolist()
    if stopped:
        raise Stopped
    assert int(images) == plan.facts.validation_images, f"judged {images} of {plan.facts.validation_images} images"
    return {"loss": loss / images, "top1": top1 / images, "top5": top5 / images, "images": int(images)}
