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
    peak, warm, schedule = plan.peak_lr, plan.warm_steps, plan.recipe.schedule
    climb = step / warm if step < warm else 1.0
    match schedule:
        case Constant():
            return _climbed(schedule, climb, peak)
        case Stepped():
            drops = sum(step > plan.steps_in(drop) for drop in schedule.drops)
            return _climbed(schedule, climb, peak * math.pow(schedule.factor, drops))
        case Exponential():
            falls = math.floor(step / plan.steps_in(schedule.every))
            return _climbed(schedule, climb, peak * math.pow(schedule.factor, falls))
        case Cosine():
            return _cosine(plan, schedule, peak, step)
        case Polynomial():
            return _polynomial(schedule, peak, step + schedule.first, plan.steps, warm)


def loss_scale(plan: Plan, step: int) -> float:
    """What the loss of a step is multiplied by, where that is not left to the gradients."""
    scale = plan.placement.loss_scale
    assert scale != "dynamic"
    return _since(plan, scale, step, 1.0) if isinstance(scale, dict) else float(scale)


def side(plan: Plan, step: int) -> int:
    """Pixels a side of the training images of a step."""
    return _since(plan, plan.recipe.augment.side, step, plan.facts.side)


def _since(plan: Plan, values: dict[str, Number], step: int, before: Number) -> Number:
    """The value of the latest time that has come, and `before` until the first of them."""
    by_start = {plan.steps_in(Duration.parse(when)): value for when, value in values.items()}
    begun = [start for start in by_start if start <= step]
    return by_start[max(begun)] if begun else before


def _cosine(plan: Plan, schedule: Cosine, peak: float, step: int) -> float:
    """The value at the beginning of the stretch that the step belongs to."""
    stretch, warm, steps, count = Fraction(1), Fraction(plan.warm_steps), Fraction(plan.steps), Fraction(step)
    if schedule.every is not None:  # stretches are fractions of the run, so nothing is rounded to steps
        stretch, warm = plan.steps_in(schedule.every), plan.steps_in(schedule.warmup)
        steps = plan.length / plan.global_batch
        count = stretch * math.floor(step / stretch)
    climb = float(min(count + schedule.first * stretch, warm) / warm) if count < warm else 1.0
    start = warm if schedule.after_warmup else Fraction(0)
    progress = float(max(Fraction(0), count - start) / max(Fraction(1), steps - start))
    fall = (1 + math.cos(math.pi * progress)) / 2
    return _climbed(schedule, climb, schedule.end + (peak - schedule.end) * fall)


def _climbed(schedule: Schedule, climb: float, rate: float) -> float:
    """The learning rate when warm-up has come a fraction `climb` of its way to `rate`."""
    return schedule.start + (rate - schedule.start) * climb if climb < 1 else rate


def _polynomial(schedule: Polynomial, peak: float, count: int, steps: int, warm: int) -> float:
    """The fall starts where the climb ends, as in the MLPerf reference."""
    if count <= warm:
        return _climbed(schedule, count / warm if warm else 1.0, peak)
    length = steps - warm + schedule.extra_steps
    left = 1 - min(count - warm, length) / length
    return (peak - schedule.end) * math.pow(left, schedule.power) + schedule.end
