"""What an update rule is, and the optimizer that applies rules to groups of flat parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.optim.clip import Clipping
from paceline.optim.flat import FlatParameters, ParameterGroup
from paceline.optim.rounding import Rounding


@dataclass(frozen=True)
class StepView:
    """What a rule sees of one group in one step; weights, gradient and state are flat, in float32 or wider."""

    flat: FlatParameters
    weights: Tensor
    gradient: Tensor
    """The clipped mean over the images, without weight decay."""
    state: dict[str, Tensor]
    lr: Tensor
    """The group's learning rate, 0-dimensional and of the weights' type."""
    decay: float
    good_steps: Tensor
    """How many good steps there have been, including this one."""

    @property
    def decayed_gradient(self) -> Tensor:
        """The gradient plus weight decay."""
        return self.gradient.add(self.weights, alpha=self.decay) if self.decay else self.gradient

    def descend(self, direction: Tensor) -> Tensor:
        """The weights minus the learning rate times a direction."""
        return torch.addcmul(self.weights, direction, self.lr, value=-1)


class Rule(Protocol):
    """How a gradient becomes a step: a pure function of a `StepView`, on tensors only."""

    @property
    def initial_state(self) -> dict[str, float]:
        """The names of the states that each weight has, and their first values."""

    @property
    def needs_step_count(self) -> bool:
        """Whether the rule depends on the number of good steps."""

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and new state; the view stays as it is."""


class FlatGroup:
    """A group of flat parameters with their rule and its state."""

    def __init__(self, group: ParameterGroup, rule: Rule, rounding: Rounding | None = None) -> None:
        self.flat, self.rule = FlatParameters(group.parameters, rounding), rule
        self._lr_factor, self._decay = group.lr_factor, group.decay
        self._state = self._first_state()

    @property
    def state(self) -> dict[str, Tensor]:
        """The rule's state by name, each a flat tensor; between steps its numbers may be changed."""
        return self._state

    def update(self, gradient: Tensor, lr: Tensor, good_steps: Tensor, bad: Tensor, step: Tensor) -> None:
        """Apply the rule to the mean gradient, unless the step is bad."""
        weights = self.flat.weights
        lr = (lr * self._lr_factor).to(weights.dtype)
        with self._state_at_hand() as before:
            view = StepView(self.flat, weights, gradient, before, lr, self._decay, good_steps)
            weights, state = self.rule.update(view)
            self.flat.write(weights, bad, step)
            for name, values in before.items():
                torch.where(bad > 0, values, state[name], out=values)

    def tensors(self) -> dict[str, Tensor]:
        """The rule's state, by parameter and state name."""
        return {
            f"{parameter}.{name}": view
            for name, values in self.state.items()
            for parameter, view in self.flat.views(values).items()
        }

    def _first_state(self) -> dict[str, Tensor]:
        return {name: self.flat.full(value) for name, value in self.rule.initial_state.items()}

    def _state_at_hand(self) -> AbstractContextManager[dict[str, Tensor]]:
        """The state on the device while it is updated in place."""
        return nullcontext(self._state)


class FlatOptimizer:
    """An optimizer of several groups, each with a rule of its own; gradients are clipped over all groups first.

    Everything is decided on the device: a bad step is computed like any other, but not written.
    """

    def __init__(self, groups: list[FlatGroup], clipping: Clipping) -> None:
        self._groups, self._clipping = groups, clipping
        self._good_steps = groups[0].flat.weights.new_zeros(())

    @torch.no_grad()
    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, step: Tensor) -> None:
        """Move the weights by gradients / divisor unless the step is bad, and drop the gradients."""
        gradients = self._clipping([group.flat.pop_gradient().div_(divisor) for group in self._groups])
        good_steps = self._good_steps + 1
        for group, gradient in zip(self._groups, gradients, strict=True):
            group.update(gradient, lr, good_steps, bad, step)
        torch.where(bad > 0, self._good_steps, good_steps, out=self._good_steps)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the optimizer carries from step to step, by name."""
        counted = any(group.rule.needs_step_count for group in self._groups)
        tensors = {"good_steps": self._good_steps} if counted else {}
        for group in self._groups:
            tensors |= group.tensors()
        return tensors
