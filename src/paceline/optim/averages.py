"""Averages of weights and running statistics: one that moves while a run trains, and one over tensors at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.planning import Plan

Tensors = dict[str, Tensor]


class Average:
    """average += (weights - average) * (1 - decay), over all weights and running statistics, float32 or wider.

    It begins as a copy of the network at its first move, and moves after the steps that its rhythm names. To be made
    when the optimizer is, because an optimizer may give the weights another place in memory.
    """

    def __init__(self, plan: Plan, module: nn.Module, decay: float) -> None:
        settings = plan.recipe.ema
        self._rhythm = plan.rhythm(settings.every, settings.start)
        self._seldom = self._rhythm.every > self._rhythm.step
        self._rate = 1 - decay
        # What is counted, not measured, has no average.
        named = {name: t for name, t in module.state_dict().items() if t.is_floating_point()}
        self._names, self._weights = list(named), list(named.values())
        self._averages = [torch.zeros_like(t, dtype=_wide(t)) for t in self._weights]

    def begun(self, step: int) -> bool:
        """Whether there is an average after `step` steps."""
        return step >= self._rhythm.first

    @torch.no_grad()
    def move(self, step: int, bad: Tensor) -> None:
        """Follow the weights after step number `step` if it is one of the rhythm.

        A bad step leaves the weights as the step before left them. An average of every step has followed those already
        and stays; one that moves less often, or begins here, has not.
        """
        if step == self._rhythm.first:
            torch._foreach_copy_(self._averages, self._weights)
        elif self._rhythm.due(step):
            dtype = self._averages[0].dtype
            rate = self._rate if self._seldom else (1 - bad).to(dtype) * self._rate
            # 16-bit weights are widened first: kernels over many tensors want one type.
            gaps = torch._foreach_sub([weight.to(dtype) for weight in self._weights], self._averages)
            torch._foreach_mul_(gaps, rate)
            torch._foreach_add_(self._averages, gaps)

    def tensors(self) -> Tensors:
        """The averages by the names of what they are averages of."""
        return dict(zip(self._names, self._averages, strict=True))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the network is the averaged one; afterwards it is its own again, bit for bit."""
        own = [weight.clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)


def blend(networks: Iterable[Tensors], decay: float | None) -> Tensors:
    """The arithmetic mean of networks, or in their order V = decay * V + (1 - decay) * R from the first on.

    In float64, then rounded to the types they came in; what is counted, not measured, is the last one's.
    """
    sums: Tensors = {}
    last: Tensors = {}
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


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
