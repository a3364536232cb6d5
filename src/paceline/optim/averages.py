"""Averages of networks: a moving one while a run trains, and one over saved networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.planning import Plan

StateDict = dict[str, Tensor]


class Ema:
    """average += (weights - average) * (1 - decay), over all weights and running statistics, in float32 or wider.

    It starts as a copy of the network at its first update, and follows after the steps that its rhythm names. Create it
    after the optimizer, which may move the weights to other memory.
    """

    def __init__(self, plan: Plan, module: nn.Module, decay: float) -> None:
        settings = plan.recipe.ema
        self._rhythm = plan.rhythm(settings.every, settings.start)
        self._every_step = self._rhythm.every <= self._rhythm.step
        self._rate = 1 - decay
        # Integer buffers are not averaged.
        named = {name: t for name, t in module.state_dict().items() if t.is_floating_point()}
        self._names, self._weights = list(named), list(named.values())
        self._averages = [torch.zeros_like(t, dtype=_at_least_float32(t)) for t in self._weights]

    def started(self, step: int) -> bool:
        """Whether there is an average after `step` steps."""
        return step >= self._rhythm.first

    @torch.no_grad()
    def update(self, step: int, bad: Tensor, recorded: Callable[[], None] | None = None) -> None:
        """Follow the weights after step number `step` if the rhythm names it; the host decides this by the step alone.

        `bad` is the step's flag; `recorded` does what `follow` does with it, if that has been recorded.
        """
        if step == self._rhythm.first:
            torch._foreach_copy_(self._averages, self._weights)
        elif self._rhythm.due(step):
            recorded() if recorded else self.follow(bad)

    @torch.no_grad()
    def follow(self, bad: Tensor) -> None:
        """Follow the weights after a step with this flag.

        A bad step leaves the weights as the step before left them. An average of every step has followed those already
        and stays; one that follows less often has not.
        """
        dtype = self._averages[0].dtype
        rate = (1 - bad).to(dtype) * self._rate if self._every_step else self._rate
        # 16-bit weights are widened first: kernels over many tensors want one type.
        differences = torch._foreach_sub([weight.to(dtype) for weight in self._weights], self._averages)
        torch._foreach_mul_(differences, rate)
        torch._foreach_add_(self._averages, differences)

    def tensors(self) -> StateDict:
        """The averages, by the names of the tensors that they follow."""
        return dict(zip(self._names, self._averages, strict=True))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the averages into the network for a while; its own tensors come back bit for bit."""
        own = [weight.clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)


def average_networks(networks: Iterable[StateDict], decay: float | None) -> StateDict:
    """The arithmetic mean of networks, or with a decay V = decay * V + (1 - decay) * network, from the first one on.

    Computed in float64 and rounded to the networks' types; integer buffers are those of the last network.
    """
    sums: StateDict = {}
    last: StateDict = {}
    count = 0
    for last in networks:
        count += 1
        for name, tensor in last.items():
            if not tensor.is_floating_point():
                continue
            wide = tensor.to(torch.float64, copy=True)
            if name not in sums:
                sums[name] = wide
            elif decay is None:
                sums[name] += wide
            else:
                sums[name] = sums[name].mul_(decay).add_(wide, alpha=1 - decay)
    divisor = count if decay is None else 1
    return {name: (sums[name] / divisor).to(t.dtype) if name in sums else t for name, t in last.items()}


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
