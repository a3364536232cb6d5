"""Bounds on the mean gradient of a step: by value, by the norm of the whole, and by the weights of each output."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from paceline.optim.flat import Slab, grain_norms
from paceline.settings.optimizer import Clip

SMALLEST = 1e-3
"""Weights of an output with a smaller norm than this are taken to have this one, or they could never leave zero."""


class Clipping:
    """The bounds of a recipe, applied to the rows of gradients of all slabs."""

    def __init__(self, bounds: Clip, slabs: list[Slab], head: Set[str]) -> None:
        """`head` names the weights that decide between classes, which adaptive clipping leaves alone."""
        self._bounds, self._slabs = bounds, slabs
        self._outputs = [_Outputs(slab, head) for slab in slabs] if bounds.adaptive else []

    def __call__(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients within the bounds: value first, then norm, then output by output."""
        bounds = self._bounds
        if bounds.value is not None:
            gradients = [gradient.clamp(-bounds.value, bounds.value) for gradient in gradients]
        if bounds.norm is not None:
            whole = torch.linalg.vector_norm(torch.cat([grain_norms(row) for row in gradients]))
            scale = (bounds.norm / whole).clamp_(max=1)  # a norm of zero gives infinity, and so 1
            gradients = [gradient * scale for gradient in gradients]
        if bounds.adaptive is not None:
            together = zip(self._outputs, self._slabs, gradients, strict=True)
            gradients = [outputs.bound(slab.wide, row, bounds.adaptive) for outputs, slab, row in together]
        return gradients


class _Outputs:
    """Where the numbers of each output of a slab's layers are."""

    def __init__(self, slab: Slab, head: Set[str]) -> None:
        lengths: list[int] = []
        bound: list[bool] = []
        for (name, parameter), length in zip(slab.parameters.items(), slab.lengths, strict=True):
            outputs = parameter.shape[0] if parameter.dim() > 1 else 1
            each = parameter.numel() // outputs
            lengths += [each] * (outputs - 1) + [length - each * (outputs - 1)]  # the gap goes to the last one
            bound += [parameter.dim() > 1 and name not in head] * outputs
        self._total = sum(lengths)
        self._lengths = torch.tensor(lengths, device=slab.wide.device)
        self._bound = torch.tensor(bound, device=slab.wide.device)

    def bound(self, weights: Tensor, gradient: Tensor, share: float) -> Tensor:
        """The gradient, each output's scaled down to a share of the norm of its weights where it is larger."""
        most = share * self._norms(weights).clamp_(min=SMALLEST)
        scale = torch.where(self._bound, (most / self._norms(gradient)).clamp_(max=1), 1.0)
        return gradient * torch.repeat_interleave(scale, self._lengths, output_size=self._total)

    def _norms(self, row: Tensor) -> Tensor:
        # Checking that the lengths add up would wait for the device.
        return torch.segment_reduce(row.square(), "sum", lengths=self._lengths, unsafe=True).sqrt_()
