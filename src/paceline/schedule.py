"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from paceline.plan import Plan
from paceline.recipe import Constant, Cosine, Exponential, Polynomial, Stepped


def lr(plan: Plan, step: int) -> float:
    """The learning rate of step number `step`, counted from 0."""
    peak, steps, warm, schedule = plan.peak_lr, plan.steps, plan.warm_steps, plan.recipe.schedule
    if isinstance(schedule, Polynomial):
        return _polynomial(schedule, peak, step + schedule.first, steps, warm)
    climb = step / warm if step < warm else 1.0
    return peak * _fall(plan, schedule, step, steps, warm) * climb


def _fall(plan: Plan, schedule: Constant | Stepped | Cosine | Exponential, step: int, steps: int, warm: int) -> float:
    """What the peak is multiplied by, warm-up apart."""
    match schedule:
        case Constant():
            return 1.0
        case Stepped():
            return math.pow(schedule.factor, sum(step > plan.steps_in(drop) for drop in schedule.drops))
        case Cosine():
            start = warm if schedule.after_warmup else 0
            progress = max(0, step - start) / max(1, steps - start)
            return (1 + math.cos(math.pi * progress)) / 2
        case Exponential():
            return math.pow(schedule.factor, math.floor(step / plan.steps_in(schedule.every)))


def _polynomial(schedule: Polynomial, peak: float, count: int, steps: int, warm: int) -> float:
    """The fall starts where the climb ends, as in the MLPerf reference."""
    if count <= warm:
        return peak * count / warm if warm else peak
    length = steps - warm + schedule.extra_steps
    left = 1 - min(count - warm, length) / length
    return (peak - schedule.end) * math.pow(left, schedule.power) + schedule.end
