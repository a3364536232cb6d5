"""Refuses plans that are too long, or in which something comes never or too late."""

from __future__ import annotations

import math

from paceline.errors import PlanError
from paceline.planning import Plan
from paceline.settings.duration import MOST_RATE
from paceline.settings.schedule import Exponential, Stepped

MOST_STEPS = 999_999_999
"""Checkpoints are named by nine digits."""


def check_lengths(plan: Plan) -> None:
    """Refuse a plan whose length, validations, saving or average of checkpoints cannot be."""
    _check_steps(plan)
    _check_validations(plan)
    if plan.saves is None and plan.placement.save_offset.amount:
        raise PlanError("on.save_offset is for saving by training, and on.save is on the clock; leave it out")
    _check_average(plan)


def _check_steps(plan: Plan) -> None:
    """Refuse more steps than checkpoints can be named after, and a learning rate that grows out of hand."""
    if plan.steps > MOST_STEPS:
        raise PlanError(
            f"epochs {plan.epochs:g} of {plan.epoch_images:,} images are {plan.steps:,} steps, and a run has at "
            f"most {MOST_STEPS:,}; write fewer epochs or a larger global_batch"
        )
    schedule, peak = plan.recipe.schedule, plan.peak_lr
    falls = 0.0
    if isinstance(schedule, Stepped):
        falls = len(schedule.drops)
    elif isinstance(schedule, Exponential):
        falls = float(plan.steps / plan.steps_in(schedule.every))
    if peak and math.log(peak) + max(0.0, falls * math.log(getattr(schedule, "factor", 1.0))) > math.log(MOST_RATE):
        key = "schedule.factor" if peak <= MOST_RATE else "optimizer.lr"
        raise PlanError(f"{key} makes the learning rate grow beyond {MOST_RATE:g}; write a smaller one")


def _check_validations(plan: Plan) -> None:
    """Refuse validations without images, and what would follow from validations that never come."""
    stop = plan.recipe.stop
    if plan.validations is not None:
        if not plan.facts.validation_images:
            raise PlanError("the data have no validation images; write evaluate.every=never, or data.validation=10%")
        return
    last = plan.recipe.average.last
    for key, value in {"stop.patience": stop.patience, "stop.target": stop.target, "average.last": last}.items():
        if value is not None:
            raise PlanError(f"{key} is about validations, and evaluate.every is never; leave one of them out")


def _check_average(plan: Plan) -> None:
    last, count = plan.recipe.average.last, len(plan.averaged_steps)
    if last is not None and (plan.recipe.stop.patience or plan.recipe.stop.target):
        raise PlanError(
            "average.last is for the last checkpoints of a whole run, and stop may end it before; leave one of them "
            "out, or keep an average of the weights all along with ema.decay"
        )
    if last is not None and count < last:
        raise PlanError(
            f"average.last={last}, and of this run's steps {count} are {plan.recipe.average.every} apart; "
            f"write average.last={count} or a shorter average.every"
        )
