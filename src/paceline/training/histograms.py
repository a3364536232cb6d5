"""Histograms of the weights and the gradients of single steps, counted on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.device import widest_float
from paceline.histogram import Histogram, Histograms
from paceline.model.whole import Whole
from paceline.planning import Plan

HISTOGRAM_BINS = 64
_PIECE = 1 << 22
"""Numbers that are sorted into bins at a time, so that a large layer takes little memory."""


class StepHistograms:
    """The histograms of each trained parameter and its gradient, in steps of which the placement wants them."""

    def __init__(self, plan: Plan, network: Whole, device: torch.device) -> None:
        self._plan = plan
        self._named = {name: p for name, p in network.module.named_parameters() if p.requires_grad}
        self._gradients, self._weights = (Counts(len(self._named), device) for _ in range(2))

    def is_wanted(self, step: int) -> bool:
        rhythm = self._plan.histograms
        return rhythm is not None and (rhythm.due(step) or step == self._plan.steps)

    @torch.no_grad()
    def take(self, scale: Tensor) -> None:
        # A parameter without a gradient took no part in the step, so it counts as 0.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._named.values()]
        self._gradients.take(gradients, scale * self._plan.global_batch)

    @torch.no_grad()
    def read(self) -> Histograms:
        """Those of the weights as they are now, and of the gradients of the last step; this waits for the device."""
        self._weights.take(self._named.values())
        counts = {"weights": self._weights, "gradients": self._gradients}
        return {group: dict(zip(self._named, each.read(), strict=True)) for group, each in counts.items()}


class Counts:
    """The histograms of so many tensors, as tensors on the device."""

    def __init__(self, tensors: int, device: torch.device) -> None:
        self._bounds = torch.zeros(tensors, 2, dtype=widest_float(device), device=device)
        self._counts = torch.zeros(tensors, HISTOGRAM_BINS + 1, dtype=torch.int64, device=device)
        """The last column counts what is not finite."""
        self._shares = torch.linspace(0, 1, HISTOGRAM_BINS + 1, dtype=self._bounds.dtype, device=device)[1:-1]
        """Where inner edges of bins are between the outer ones."""

    def take(self, tensors: Iterable[Tensor], divisor: Tensor | float = 1.0) -> None:
        """Count the numbers of these tensors, each divided by a number above zero, without waiting for the device."""
        self._counts.zero_()
        for tensor, bounds, counts in zip(tensors, self._bounds, self._counts, strict=True):
            values = (tensor.float() if tensor.itemsize < 4 else tensor).reshape(-1)
            infinite = ~values.isfinite()
            low, high = values.masked_fill(infinite, math.inf).amin(), values.masked_fill(infinite, -math.inf).amax()
            margin = (0.5 + low.abs() / 1000) * (low == high)
            low, high = low - margin, high + margin
            inner = low + (high - low) * self._shares.to(values.dtype)
            for piece in values.split(_PIECE):
                self._count(piece, low, inner, high, counts)
            bounds.copy_(torch.stack([low, high]) / divisor)

    @staticmethod
    def _count(values: Tensor, low: Tensor, inner: Tensor, high: Tensor, counts: Tensor) -> None:
        """Add how many numbers lie between edges, by their places among the sorted ones.

        To add to the bin of each number would take atomic operations, whose deterministic form waits for the device.
        """
        # What is no number has no place in an order.
        ordered = values.nan_to_num(math.inf, math.inf, -math.inf).sort().values
        first, last = torch.searchsorted(ordered, low[None]), torch.searchsorted(ordered, high[None], right=True)
        ends = torch.cat([first, torch.searchsorted(ordered, inner), last])
        finite = (last - first) * (low <= high)  # else there is none
        counts += torch.cat([ends.diff() * (low <= high), len(values) - finite])

    def read(self) -> list[Histogram]:
        """The histograms in the order of the tensors; this waits for the device."""
        read = zip(self._bounds.tolist(), self._counts.tolist(), strict=True)
        return [
            Histogram(_finite(low), _finite(high), counts, not_finite) for (low, high), (*counts, not_finite) in read
        ]


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
