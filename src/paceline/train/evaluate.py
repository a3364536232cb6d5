"""Accuracy over the whole validation set: every image once, whatever the number of replicas, and counted."""

from __future__ import annotations

import torch

from paceline.data.batches import Loader
from paceline.model.whole import JUDGEMENT, Whole, exact
from paceline.plan import Plan
from paceline.record import Run
from paceline.train.state import State
from paceline.world import World


def judge(plan: Plan, world: World, state: State, loader: Loader) -> dict[str, float | int]:
    """Accuracy of what a run has made so far: its averaged weights where there is an average, else its weights."""
    if state.average is None:
        return evaluate(plan, world, state.network, loader)
    if not state.average.begun(state.step):
        return evaluate(plan, world, state.network, loader) | {"averaged": False}
    with state.average.shown():
        return evaluate(plan, world, state.network, loader) | {"averaged": True}


def owes_judgement(plan: Plan, world: World, run: Run, step: int) -> bool:
    """Whether a run ended between a step and the validation that was due after it."""
    rhythm = plan.rhythm(plan.recipe.evaluate.every, plan.recipe.evaluate.offset)
    due = step == plan.steps or rhythm.due(step)
    known = any(row["step"] == step for row in run.rows() if row["kind"] == "validation")
    return bool(world.agree([int(due and not known)])[0])


def evaluate(plan: Plan, world: World, network: Whole, loader: Loader) -> dict[str, float | int]:
    """Mean loss, top-1 and top-5 accuracy of the network as it is."""
    sums = torch.zeros(len(JUDGEMENT), dtype=exact(world.device), device=world.device)
    for batch in loader.validation():
        sums += network.judge(batch)
    loss, top1, top5, images = world.sum(sums).tolist()
    assert int(images) == plan.facts.validation_images, f"judged {images} of {plan.facts.validation_images} images"
    return {"loss": loss / images, "top1": top1 / images, "top5": top5 / images, "images": int(images)}
