"""The learning rate, the loss scale and the image side as pure functions of the step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TypeVar

from paceline.planning import Plan
from paceline.settings.duration import Duration
from paceline.settings.schedule import Constant, Cosine, Exponential, Polynomial, Schedule, Stepped

Number = TypeVar("Number", int, float)


def lr(plan: Plan, step: int) -> float:
    """The learning rate of step number `step`, counted from 0."""
    peak, steps, warm, schedule = plan.peak_lr, plan.steps, plan.warm_steps, plan.recipe.schedule
    if isinstance(schedule, Polynomial):
        return _polynomial(schedule, peak, step + schedule.first, steps, warm)
    if isinstance(schedule, Cosine):
        return _cosine(plan, schedule, peak, step)
    climb = step / warm if step < warm else 1.0
    return _climbed(schedule, climb, peak * _fall(plan, schedule, step))


def loss_scale(plan: Plan, step: int) -> float:
    """What the loss of a step is multiplied by, where that is not left to the gradients."""
    given = plan.placement.loss_scale
    assert given != "dynamic"
    if not isinstance(given, dict):
        return float(given)
    return _since(plan, given, step, 1.0)


def side(plan: Plan, step: int) -> int:
    """Pixels a side of the training images of a step."""
    return _since(plan, plan.recipe.augment.side, step, plan.facts.side)


def _since(plan: Plan, given: dict[str, Number], step: int, before: Number) -> Number:
    """What was given for the latest time that has come, and `before` the first of them."""
    begun = {plan.steps_in(Duration.parse(when)): value for when, value in given.items()}
    due = [start for start in begun if start <= step]
    return begun[max(due)] if due else before


def _fall(plan: Plan, schedule: Constant | Stepped | Exponential, step: int) -> float:
    """What the peak is multiplied by, warm-up apart."""
    match schedule:
        case Constant():
            return 1.0
        case Stepped():
            return math.pow(schedule.factor, sum(step > plan.steps_in(drop) for drop in schedule.drops))
        case Exponential():
            return math.pow(schedule.factor, math.floor(step / plan.steps_in(schedule.every)))


def _cosine(plan: Plan, schedule: Cosine, peak: float, step: int) -> float:
    """The value at the beginning of the stretch that the step belongs to."""
    stretch, warm, steps, count = Fraction(1), Fraction(plan.warm_steps), Fraction(plan.steps), Fraction(step)
    if schedule.every is not None:  # whole stretches are whole shares of the run, so nothing is rounded to steps
        stretch, warm = plan.steps_in(schedule.every), plan.steps_in(schedule.warmup)
        steps = plan.steps_in(Duration(Fraction(str(plan.recipe.epochs)), "epochs"))
        count = stretch * math.floor(step / stretch)
    climb = float(min(count + schedule.first * stretch, warm) / warm) if count < warm else 1.0
    start = warm if schedule.after_warmup else Fraction(0)
    progress = float(max(Fraction(0), count - start) / max(Fraction(1), steps - start))
    fall = (1 + math.cos(math.pi * progress)) / 2
    return _climbed(schedule, climb, schedule.end + (peak - schedule.end) * fall)


def _climbed(schedule: Schedule, climb: float, rate: float) -> float:
    """How far warm-up has come, a share from 0 to 1, on its way to the rate that it makes way for."""
    return schedule.start + (rate - schedule.start) * climb if climb < 1 else rate


def _polynomial(schedule: Polynomial, peak: float, count: int, steps: int, warm: int) -> float:
    """The fall starts where the climb ends, as in the MLPerf reference."""
    if count <= warm:
        return _climbed(schedule, count / warm if warm else 1.0, peak)
    length = steps - warm + schedule.extra_steps
    left = 1 - min(count - warm, length) / length
    return (peak - schedule.end) * math.pow(left, schedule.power) + schedule.end
