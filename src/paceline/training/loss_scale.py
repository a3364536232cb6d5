"""The loss scale: what the loss is multiplied by so that small gradients survive 16-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import schedule
from paceline.planning import Plan

START = 2.0**10
"""Where a dynamic scale begins, for a loss that is summed over images."""
PATIENCE = 2000
"""Good steps after which a dynamic scale is doubled."""
BOUNDS = (2.0**-24, 2.0**24)


class LossScale:
    """A power of two on the device, and how many good steps have passed since it last changed."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self.dynamic = plan.placement.loss_scale == "dynamic"
        self.used = plan.placement.loss_scale != 1.0
        first = START if self.dynamic else schedule.loss_scale(plan, 0)
        self.value = torch.tensor(first, device=device)
        self.good_steps = torch.zeros((), device=device)

    def now(self, step: int) -> Tensor | None:
        """The scale of a step; None stands for 1."""
        if not self.used:
            return None
        if not self.dynamic:
            self.value.fill_(schedule.loss_scale(self._plan, step))
        return self.value

    def heed(self, bad: Tensor) -> None:
        """Halve a dynamic scale after a bad step and double it after many good ones; the host does not look."""
        if not self.dynamic:
            return
        self.good_steps.copy_(torch.where(bad > 0, 0, self.good_steps + 1))
        due = self.good_steps >= PATIENCE
        factor = torch.where(bad > 0, 0.5, torch.where(due, 2.0, 1.0))
        self.value.mul_(factor).clamp_(*BOUNDS)
        self.good_steps.mul_(~due)
