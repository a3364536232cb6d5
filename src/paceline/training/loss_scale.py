"""The loss scale: what the loss is multiplied by so that small gradients survive 16-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import schedule
from paceline.planning import Plan

INITIAL_SCALE = 2.0**10
"""The first dynamic scale, for a loss that is summed over images."""
GROWTH_INTERVAL = 2000
"""How many good steps in a row double a dynamic scale."""
SCALE_BOUNDS = (2.0**-24, 2.0**24)


class LossScale:
    """A power of two on the device, and how many good steps have passed since it last changed.

    The loss is multiplied by it even where it is 1, which changes no bit and costs next to nothing.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self.dynamic = plan.placement.loss_scale == "dynamic"
        self._scheduled = isinstance(plan.placement.loss_scale, dict)
        first = INITIAL_SCALE if self.dynamic else schedule.loss_scale(plan, 0)
        self.value = torch.tensor(first, device=device)
        self.good_steps = torch.zeros((), device=device)

    def now(self, step: int) -> Tensor:
        """The scale of a step, always the same tensor: its value changes, and is 1 where nothing is scaled."""
        if self._scheduled:
            self.value.fill_(schedule.loss_scale(self._plan, step))
        return self.value

    def update(self, bad: Tensor) -> None:
        """Halve a dynamic scale after a bad step and double it after many good ones, without reading the flag."""
        if not self.dynamic:
            return
        self.good_steps.copy_(torch.where(bad > 0, 0, self.good_steps + 1))
        due = self.good_steps >= GROWTH_INTERVAL
        factor = torch.where(bad > 0, 0.5, torch.where(due, 2.0, 1.0))
        self.value.mul_(factor).clamp_(*SCALE_BOUNDS)
        self.good_steps.mul_(~due)
