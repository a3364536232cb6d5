"""Accuracy over the whole validation set: every image once, whatever the number of replicas, and counted."""

from __future__ import annotations

from contextlib import closing

import torch

from paceline.device import widest_float
from paceline.model.metrics import EVAL_SUMS
from paceline.training.requests import Stopped
from paceline.training.session import Session

Evaluation = dict[str, float | int]
"""Mean loss, top-1 and top-5 accuracy, and the number of images they are of."""


def evaluate(session: Session) -> Evaluation:
    """Evaluate what a run has made so far: its EMA where it has one that has started, else its weights."""
    ema = session.state.ema
    if ema is None:
        return evaluate_network(session)
    if not ema.started(session.state.step):
        return evaluate_network(session) | {"averaged": False}
    with ema.swapped_in():
        return evaluate_network(session) | {"averaged": True}


def evaluate_network(session: Session) -> Evaluation:
    """Evaluate the network as it is; raises Stopped if a signal comes before the end."""
    world, total = session.world, session.plan.facts.validation_images
    sums = torch.zeros(len(EVAL_SUMS) + 1, dtype=widest_float(world.device), device=world.device)
    images = 0
    with closing(session.loader.validation()) as batches:
        for batch in batches:
            if session.requests.urgent:
                sums[-1] = 1  # the others learn of it with the sums, when they come to the end or leave too
                break
            sums[:-1] += session.state.network.score(batch)
            images += batch.count
            session.run.progress("validation", min(images * world.replicas, total), total)
    *values, stopped = world.all_reduce(sums).tolist()
    if stopped:
        raise Stopped
    result = dict(zip(EVAL_SUMS, values, strict=True))
    count = int(result["images"])
    assert count == total, f"evaluated {count} of {total} images"
    return {name: value / count for name, value in result.items()} | {"images": count}


def validation_is_owed(session: Session) -> bool:
    """Whether a run ended between a step and the validation that was due after it."""
    plan, step = session.plan, session.state.step
    rhythm = plan.rhythm(plan.recipe.evaluate.every, plan.recipe.evaluate.offset)
    done = any(row["step"] == step for row in session.run.rows() if row["kind"] == "validation")
    owed = (step == plan.steps or rhythm.due(step)) and not done
    return session.world.broadcast_object(owed)
