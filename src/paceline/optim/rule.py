"""What a rule for taking steps is, and the optimizer that carries one out slab by slab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.optim.clip import Clipping
from paceline.optim.flat import Group, Slab


@dataclass(frozen=True)
class Moment:
    """What a rule sees of one slab in one step; every row is float32 or wider."""

    slab: Slab
    weights: Tensor
    gradient: Tensor
    """The mean over the images, clipped, without weight decay."""
    state: dict[str, Tensor]
    lr: Tensor
    decay: float
    steps: Tensor
    """How many good steps there were, this one included."""

    @property
    def decayed(self) -> Tensor:
        """The gradient with weight decay added to it."""
        return self.gradient.add(self.weights, alpha=self.decay) if self.decay else self.gradient


class Rule(Protocol):
    """How a gradient becomes a step: a pure function of the moment."""

    @property
    def starts(self) -> dict[str, float]:
        """The states that each number of the weights carries, and what they start as."""
        ...

    @property
    def counts(self) -> bool:
        """Whether it needs to know how many good steps there were."""
        ...

    def move(self, now: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and new states; what it is given stays as it is."""
        ...


class Part:
    """The parameters of a group in their slab, with the rule that moves them."""

    def __init__(self, group: Group, rule: Rule, rounding: int | None = None) -> None:
        self.slab, self.rule = Slab(group.parameters, rounding), rule
        self._lr_factor, self._decay = group.lr_factor, group.decay
        self._state = {name: self.slab.row(value) for name, value in rule.starts.items()}

    def move(self, gradient: Tensor, lr: Tensor, steps: Tensor, bad: Tensor, step: Tensor) -> None:
        """One step by the mean gradient, unless it is bad."""
        rate = (lr * self._lr_factor).to(gradient.dtype)
        now = Moment(self.slab, self.slab.wide, gradient, self._state, rate, self._decay, steps)
        weights, state = self.rule.move(now)
        self.slab.write(weights, bad, step)
        for name, row in self._state.items():
            torch.where(bad > 0, row, state[name], out=row)

    def tensors(self) -> dict[str, Tensor]:
        """Its states, window by window."""
        return {
            f"{parameter}.{name}": window
            for name, row in self._state.items()
            for parameter, window in self.slab.windows(row).items()
        }


class Ruled:
    """An optimizer made of parts, each with its rule; gradients are gathered and clipped for all of them first.

    Everything is decided on the device: a bad step is computed like any other, and not written.
    """

    def __init__(self, parts: list[Part], clipping: Clipping) -> None:
        self._parts, self._clipping = parts, clipping
        self._steps = parts[0].slab.wide.new_zeros(())

    @torch.no_grad()
    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, step: Tensor) -> None:
        """Move the weights by gradients / divisor, unless the step is bad, and let the gradients go."""
        gradients = self._clipping([part.slab.gradient().div_(divisor) for part in self._parts])
        steps = self._steps + 1
        for part, gradient in zip(self._parts, gradients, strict=True):
            part.move(gradient, lr, steps, bad, step)
        torch.where(bad > 0, self._steps, steps, out=self._steps)

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        found = {"good_steps": self._steps} if any(part.rule.counts for part in self._parts) else {}
        for part in self._parts:
            found |= part.tensors()
        return found
