"""What is computed from the gradients of single steps, for people: their norm.

The device computes it between the exchange of gradients and the update, only in steps of which it is wanted. The host
reads it together with what it reads anyway.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.device import widest_float
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.world import World


class GradientReader(Protocol):
    """Computes something from the gradients of some steps; it touches tensors only, so that CUDA graphs can hold it."""

    def is_wanted(self, step: int) -> bool:
        """Whether this step's gradients will be asked for; 1 is the first step."""

    def take(self, scale: Tensor) -> None:
        """Compute it from gradients that are summed over a step's images and multiplied by the loss scale."""


class GradientNorm:
    """The norm of the mean gradient over a step's images, before clipping; reports tell that of their last step."""

    def __init__(self, plan: Plan, network: Whole, world: World) -> None:
        self._plan, self._network, self._world = plan, network, world
        self.value = torch.zeros((), dtype=widest_float(world.device), device=world.device)

    def is_wanted(self, step: int) -> bool:
        reports = self._plan.reports
        return reports is None or reports.due(step) or step == self._plan.steps

    def take(self, scale: Tensor) -> None:
        gradients = [p.grad for p in self._network.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, dtype=self.value.dtype))
        norm = self._world.over_stages(norms.square().sum()).sqrt()
        self.value.copy_(norm / (scale * self._plan.global_batch))
