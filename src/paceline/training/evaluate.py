"""Accuracy over the whole validation set: every image once, whatever the number of replicas, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from paceline.data.load.batches import MicroBatch
from paceline.model.hardest import HARDEST, Hardest, HardImage
from paceline.model.metrics import ClassCounts, EvaluationSums, Means
from paceline.training.requests import Stopped
from paceline.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """What came out of a validation."""

    row: Means
    """What a row of the record tells of it."""
    counts: ClassCounts
    hardest: list[HardImage]
    """The images with the largest losses, the largest first."""


def evaluate(session: Session, hardest: int = HARDEST) -> Evaluation:
    """Evaluate what a run has made so far: its EMA where it has one that has started, else its weights."""
    ema = session.state.ema
    if ema is None:
        return evaluate_network(session, hardest)
    if not ema.started(session.state.step):
        return _with_ema(evaluate_network(session, hardest), False)
    with ema.swapped_in():
        return _with_ema(evaluate_network(session, hardest), True)


def _with_ema(evaluation: Evaluation, averaged: bool) -> Evaluation:
    return replace(evaluation, row=evaluation.row | {"averaged": averaged})


def evaluate_network(session: Session, hardest: int = HARDEST) -> Evaluation:
    """Evaluate the network as it is, and keep so many images; raises Stopped if a signal comes before the end."""
    world, total, there = session.world, session.plan.evaluated_images, session.plan.facts.validation_images
    sums = EvaluationSums(session.plan.facts.classes, world.device)
    hard, stopped = Hardest(min(hardest, total), world.device), sums.flat.new_zeros(1)
    seen = 0
    network = session.state.network
    with network.evaluating(), closing(session.loader.validation()) as batches:
        while (batch := _next(session, batches)) is not None:
            if session.requests.urgent and world.stages == 1:  # a stage that left would not be waited for
                stopped.fill_(1)  # the others learn of it with the sums, when they come to the end or leave too
                break
            assert batch.indices is not None
            answers = network.answers(batch)
            sums.add(answers)
            hard.add(answers, batch.indices)
            seen += batch.count
            session.run.progress("validation", min(seen * world.replicas, total), total)
        if network.evaluation_fault:
            session.run.note(f"Evaluation is not recorded as a CUDA graph: {network.evaluation_fault}")
    totals = world.all_reduce(torch.cat([sums.flat, stopped])).cpu()
    if totals[-1]:
        raise Stopped
    sums.flat = totals[:-1]
    row = sums.means()
    assert row["images"] == total, f"evaluated {row['images']} of {total} images"
    if total < there:
        row |= {"partial": True, "of_images": there}
    return Evaluation(row, sums.counts(), hard.over_replicas(world))


def _next(session: Session, batches: Iterator[MicroBatch]) -> MicroBatch | None:
    """The next images, or None after the last."""
    with session.requests.waiting():
        return next(batches, None)


def validation_is_owed(session: Session) -> bool:
    """Whether a run ended between a step and the validation that was due after it."""
    plan, state = session.plan, session.state
    if plan.validations is None or state.stopping.validated == state.step:
        return False
    return state.step == plan.steps or plan.validations.due(state.step)
