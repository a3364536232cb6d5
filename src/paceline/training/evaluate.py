"""Accuracy over the whole validation set: every image once, whatever the number of replicas, and counted."""

from __future__ import annotations

from contextlib import closing

import torch

from paceline.model.metrics import Evaluation, EvaluationSums
from paceline.training.requests import Stopped
from paceline.training.session import Session


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
    zeros = EvaluationSums.zeros(session.plan.facts.classes, world.device)
    sums, stopped = zeros.flat(), zeros.images.new_zeros(1)
    seen = 0
    with closing(session.loader.validation()) as batches:
        for batch in batches:
            if session.requests.urgent:
                stopped.fill_(1)  # the others learn of it with the sums, when they come to the end or leave too
                break
            sums += session.state.network.evaluation_sums(batch).flat()
            seen += batch.count
            session.run.progress("validation", min(seen * world.replicas, total), total)
    totals, stops = world.all_reduce(torch.cat([sums, stopped])).cpu().split([len(sums), 1])
    if stops:
        raise Stopped
    result = zeros.unflatten(totals).means()
    assert result["images"] == total, f"evaluated {result['images']} of {total} images"
    return result


def validation_is_owed(session: Session) -> bool:
    """Whether a run ended between a step and the validation that was due after it."""
    plan, step = session.plan, session.state.step
    rhythm = plan.rhythm(plan.recipe.evaluate.every, plan.recipe.evaluate.offset)
    done = any(row["step"] == step for row in session.run.rows() if row["kind"] == "validation")
    owed = (step == plan.steps or rhythm.due(step)) and not done
    return session.world.broadcast_object(owed)
