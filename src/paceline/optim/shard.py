"""The optimizer's state in shares: each replica keeps that of some parameters, updates those, and sends them to all.

This is ZeRO-1. Gradients are summed on every replica as always, so each sees all of them: clipping, and the flag of a
bad step, need no exchange of their own and are the same bits everywhere. Only the updated weights are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.optim.rule import FlatGroup, FlatOptimizer
from paceline.world import World

HOST = torch.device("cpu")


class OthersGroup(FlatGroup):
    """A group that another replica updates: its gradients are clipped with all others; its weights come from there."""

    def update(self, gradient: Tensor, lr: Tensor, good_steps: Tensor, bad: Tensor, step: Tensor) -> None:
        pass

    def take_in(self) -> None:
        """Make room for the state on the host."""
        self._state = {name: self.flat.full(value, HOST) for name, value in self.rule.initial_state.items()}

    def drop(self) -> None:
        """Keep no state any longer."""
        self._state = {}

    def _first_state(self) -> dict[str, Tensor]:
        return {}


class ShardedOptimizer:
    """An optimizer whose groups, in order, each belong to a replica."""

    def __init__(self, optimizer: FlatOptimizer, shares: Sequence[tuple[FlatGroup, int]], world: World) -> None:
        self._optimizer, self._shares, self._world = optimizer, shares, world

    @torch.no_grad()
    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, step: Tensor) -> None:
        """Move the weights of this replica's share, and take those of the others from them."""
        self._optimizer.step(lr, divisor, bad, step)
        self._world.exchange([(group.flat.stored, owner) for group, owner in self._shares])

    def tensors(self) -> dict[str, Tensor]:
        """What this replica carries from step to step, by name; while `gathered`, what all do."""
        return self._optimizer.tensors()

    @contextmanager
    def gathered(self, keep: bool = True) -> Iterator[None]:
        """Have the state of all replicas for a while, that of the others on the host; every replica must call it.

        What is then changed of one's own share stays. With `keep` false a replica gives only.
        """
        others = [group for group, _ in self._shares if isinstance(group, OthersGroup)]
        try:
            for group, owner in self._shares:
                if isinstance(group, OthersGroup):
                    group.take_in()
                self._world.broadcast(list(group.state.values()), owner)
                if isinstance(group, OthersGroup) and not keep:
                    group.drop()
            yield
        finally:
            for group in others:
                group.drop()
