"""Gradient clipping: by value, by the norm of all gradients, and by the weights of each output."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from paceline.optim.flat import FlatParameters, span_norms
from paceline.settings.optimizer import Clip
from paceline.world import World

MIN_WEIGHT_NORM = 1e-3
"""Adaptive clipping takes smaller weight norms for this one, or weights of zero could never leave zero."""


class Clipping:
    """A recipe's limits, applied to the flat gradients of all groups."""

    def __init__(self, limits: Clip, groups: list[FlatParameters], head: Set[str], world: World | None = None) -> None:
        """`head` names the weights of the classifier, which adaptive clipping leaves alone; the stages of `world` have
        the other gradients of the network."""
        self._limits, self._groups = limits, groups
        self._world = world if world is not None and world.stages > 1 else None
        self._outputs = [_Outputs(flat, head) for flat in groups] if limits.adaptive else []

    def __call__(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients within the limits: by value first, then by norm, then output by output."""
        limits = self._limits
        if limits.value is not None:
            gradients = [gradient.clamp(-limits.value, limits.value) for gradient in gradients]
        if limits.norm is not None:
            norm = torch.linalg.vector_norm(torch.cat([span_norms(gradient) for gradient in gradients]))
            norm = norm if self._world is None else self._world.over_stages(norm.square()).sqrt()
            factor = (limits.norm / norm).clamp_(max=1)  # a norm of zero gives infinity, and so 1
            gradients = [gradient * factor for gradient in gradients]
        if limits.adaptive is not None:
            triples = zip(self._outputs, self._groups, gradients, strict=True)
            gradients = [outputs.clip(gradient, flat.weights, limits.adaptive) for outputs, flat, gradient in triples]
        return gradients


class _Outputs:
    """Where the numbers of each layer's outputs are in flat parameters."""

    def __init__(self, flat: FlatParameters, head: Set[str]) -> None:
        lengths: list[int] = []
        clipped: list[bool] = []
        for (name, parameter), length in zip(flat.parameters.items(), flat.lengths, strict=True):
            outputs = parameter.shape[0] if parameter.dim() > 1 else 1
            size = parameter.numel() // outputs
            lengths += [size] * (outputs - 1) + [length - size * (outputs - 1)]  # the last one has the padding
            clipped += [parameter.dim() > 1 and name not in head] * outputs
        self._total = sum(lengths)
        self._lengths = torch.tensor(lengths, device=flat.weights.device)
        self._clipped = torch.tensor(clipped, device=flat.weights.device)

    def clip(self, gradient: Tensor, weights: Tensor, fraction: float) -> Tensor:
        """The gradient, with each output's norm at most a fraction of the norm of its weights."""
        limits = fraction * self._norms(weights).clamp_(min=MIN_WEIGHT_NORM)
        factors = torch.where(self._clipped, (limits / self._norms(gradient)).clamp_(max=1), 1.0)
        return gradient * torch.repeat_interleave(factors, self._lengths, output_size=self._total)

    def _norms(self, flat: Tensor) -> Tensor:
        # Checking that the lengths add up would wait for the device.
        return torch.segment_reduce(flat.square(), "sum", lengths=self._lengths, unsafe=True).sqrt_()
