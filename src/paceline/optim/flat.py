"""Parameters side by side in one flat tensor, so that a step takes a handful of kernels for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from paceline.optim.rounding import Rounding, RoundingBits, stochastic_round

BLOCK = 64
"""Each parameter starts at a multiple of this many numbers, because convolutions are slow on unaligned weights; factors
of single parameters are multiplied block by block."""
SPAN = 16
"""Norms are computed from those of so many numbers each, four to a block, so that those of each parameter are aligned.
From norms of whole blocks, CUDA gave other last bits where other parameters lay beside it."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share weight decay, learning-rate factor and type."""

    decay: float
    lr_factor: float
    parameters: dict[str, nn.Parameter]

    def split(self, chosen: Callable[[str, Tensor], bool]) -> tuple[ParameterGroup, ParameterGroup]:
        """The parameters that `chosen` accepts by name and value, and the others; either group may be empty."""
        yes = {name: p for name, p in self.parameters.items() if chosen(name, p)}
        no = {name: p for name, p in self.parameters.items() if name not in yes}
        return replace(self, parameters=yes), replace(self, parameters=no)


class FlatParameters:
    """One flat tensor that holds all parameters; each parameter becomes a view of it.

    Equal shapes lie next to each other. A convolution is stored output by output with its channels innermost, so that
    its view is channels_last and the numbers of one output are contiguous. The padding between parameters is zero in
    weights and gradients, and every rule keeps it so. Weights may be copied into the views at any time, but a module
    whose parameters are replaced, or moved to another type or device, leaves its flat tensor.
    """

    @torch.no_grad()
    def __init__(self, parameters: dict[str, nn.Parameter], rounding: Rounding | None = None) -> None:
        """With a `rounding`, 16-bit weights are rounded stochastically; without, to the nearest."""
        self.parameters = in_flat_order(parameters)
        first = next(iter(parameters.values()))
        assert all((p.dtype, p.device) == (first.dtype, first.device) for p in parameters.values())
        self.lengths = [padded(p.numel()) for p in self.parameters.values()]
        blocks = torch.tensor([length // BLOCK for length in self.lengths])
        self._parameter_of_block = torch.repeat_interleave(blocks).to(first.device)
        self._flat = torch.zeros(sum(self.lengths), dtype=first.dtype, device=first.device)
        self._rounding = None if rounding is None else self._rounding_bits(rounding)
        self._padding = torch.zeros(BLOCK, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters.values(), self._views(self._flat), strict=True):
            view.copy_(parameter)
            parameter.data = view

    @property
    def weights(self) -> Tensor:
        """All weights, in float32 or wider."""
        return self._flat.to(self._arithmetic)

    @property
    def stored(self) -> Tensor:
        """All weights where they are, in the type that they have."""
        return self._flat

    def pop_gradient(self) -> Tensor:
        """The gradients of all parameters in float32 or wider, removed from the parameters.

        A parameter without a gradient took no part in this step; on other replicas it may have one, so it counts as 0.
        """
        pieces: list[Tensor] = []
        for parameter, length in zip(self.parameters.values(), self.lengths, strict=True):
            gradient = parameter.grad
            pieces.append(self._flat.new_zeros(parameter.numel()) if gradient is None else _flatten(gradient))
            pieces.append(self._padding[: length - parameter.numel()])
            parameter.grad = None
        return torch.cat(pieces).to(self._arithmetic)

    def write(self, weights: Tensor, bad: Tensor, step: Tensor) -> None:
        """Replace the weights unless the step is bad; nothing else changes them."""
        if self._rounding is not None:
            weights = stochastic_round(weights, self._flat.dtype, self._rounding.at(step))
        torch.where(bad > 0, self._flat, weights.to(self._flat.dtype), out=self._flat)

    def full(self, value: float, device: torch.device | None = None) -> Tensor:
        """A flat tensor of this value for each weight, in float32 or wider; beside the weights unless it says where."""
        return torch.full_like(self._flat, value, dtype=self._arithmetic, device=device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by parameter name, each with its parameter's shape."""
        return dict(zip(self.parameters, self._views(flat), strict=True))

    def norms(self, flat: Tensor) -> Tensor:
        """The norm of each parameter's numbers in a flat tensor."""
        return torch.stack(torch._foreach_norm(span_norms(flat).split([length // SPAN for length in self.lengths])))

    def multiply(self, flat: Tensor, factors: Tensor) -> Tensor:
        """A flat tensor times one factor for each parameter."""
        # Block by block, because a tensor of repeated factors would be as large as the weights, and slow to make.
        return (flat.view(-1, BLOCK) * factors[self._parameter_of_block, None]).view(-1)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor as stacks of matrices, outputs by everything else, one stack for each shape."""
        stacks, start = [], 0
        for shape, same in groupby(self.parameters.values(), key=lambda p: p.shape):
            count, length = len(list(same)), padded(shape.numel())
            stack = flat[start : start + count * length].view(count, length)[:, : shape.numel()]
            stacks.append(stack.unflatten(1, (shape[0], -1)))
            start += count * length
        return stacks

    @property
    def _arithmetic(self) -> torch.dtype:
        return torch.float32 if self._flat.dtype.itemsize < 4 else self._flat.dtype

    def _rounding_bits(self, rounding: Rounding) -> RoundingBits:
        starts = [rounding.starts[name] for name in self.parameters]
        runs = [torch.arange(a // 4, (a + length) // 4) for a, length in zip(starts, self.lengths, strict=True)]
        return RoundingBits(rounding.key, torch.cat(runs).to(self._flat.device))

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(flat.split(self.lengths), self.parameters.values(), strict=True)
        return [_unflatten(piece[: p.numel()], p.shape) for piece, p in pieces]


def in_flat_order(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters as they lie in a flat tensor, equal shapes next to each other."""
    return dict(sorted(parameters.items(), key=lambda item: tuple(item[1].shape)))


def flat_starts(parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """At which number of a flat tensor each parameter starts."""
    ordered = in_flat_order(parameters)
    ends = accumulate(padded(p.numel()) for p in ordered.values())
    return dict(zip(ordered, [0, *ends], strict=False))


def span_norms(flat: Tensor) -> Tensor:
    """The norm of every span, from which norms over more are computed: adding up a hundred million squares one after
    the other costs float32 a percent."""
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, SPAN), dim=1)
    return norms


def padded(length: int) -> int:
    """How many numbers of a flat tensor a parameter of this many takes."""
    return -(-length // BLOCK) * BLOCK


def _flatten(tensor: Tensor) -> Tensor:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _unflatten(piece: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    outputs, inputs, height, width = shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
