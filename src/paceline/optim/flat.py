"""Parameters side by side in one flat tensor, so that a step is a handful of kernels over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from paceline.optim.rounding import Chances, round_by_chance

GRAIN = 64
"""Windows begin at multiples of this many numbers: convolutions are slow on weights that are not aligned; and what is
done parameter by parameter is done for this many numbers at a time."""


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike."""

    decay: float
    lr_factor: float
    parameters: dict[str, nn.Parameter]

    def split(self, chosen: Callable[[str, Tensor], bool]) -> tuple[Group, Group]:
        """Those that are chosen by name and value, and the others; either may be empty."""
        yes = {name: p for name, p in self.parameters.items() if chosen(name, p)}
        no = {name: p for name, p in self.parameters.items() if name not in yes}
        return replace(self, parameters=yes), replace(self, parameters=no)


class Slab:
    """One flat row that holds parameters, each of which becomes a window into it.

    Equal shapes lie side by side. A convolution's numbers are stored output by output, its channels innermost, so that
    its window is channels_last and the numbers of one output are a run of the row. Gaps between windows are zero in
    weights and gradients, and every rule keeps them so. Weights can be copied into the windows at any time; a module
    whose parameters are replaced or moved to another type or device leaves its slab.
    """

    @torch.no_grad()
    def __init__(self, parameters: dict[str, nn.Parameter], rounding: int | None = None) -> None:
        self.parameters = dict(sorted(parameters.items(), key=lambda item: tuple(item[1].shape)))
        first = next(iter(parameters.values()))
        assert all((p.dtype, p.device) == (first.dtype, first.device) for p in parameters.values())
        self.lengths = [-(-p.numel() // GRAIN) * GRAIN for p in self.parameters.values()]
        grains = torch.tensor([length // GRAIN for length in self.lengths])
        self._owners = torch.repeat_interleave(grains).to(first.device)
        self._flat = torch.zeros(sum(self.lengths), dtype=first.dtype, device=first.device)
        self._rounding = None if rounding is None else Chances(rounding, len(self._flat), first.device)
        """By what 16-bit weights are rounded up or down; None rounds to the nearest."""
        self._gap = torch.zeros(GRAIN, dtype=first.dtype, device=first.device)
        for parameter, window in zip(self.parameters.values(), self._windows(self._flat), strict=True):
            window.copy_(parameter)
            parameter.data = window

    @property
    def wide(self) -> Tensor:
        """The weights as a rule sees them: float32 or wider."""
        return self._flat.to(self._arithmetic)

    def gradient(self) -> Tensor:
        """The gradients of all parameters as one row, float32 or wider; the parameters let theirs go.

        A parameter without one took no part in this step, which other replicas would call a gradient of zero.
        """
        pieces: list[Tensor] = []
        for parameter, length in zip(self.parameters.values(), self.lengths, strict=True):
            found = parameter.grad
            pieces.append(self._flat.new_zeros(parameter.numel()) if found is None else _unrolled(found))
            pieces.append(self._gap[: length - parameter.numel()])
            parameter.grad = None
        return torch.cat(pieces).to(self._arithmetic)

    def write(self, new: Tensor, bad: Tensor, step: Tensor) -> None:
        """Take new weights, unless the step is bad; the only place where weights change."""
        if self._rounding is not None:
            new = round_by_chance(new, self._flat.dtype, self._rounding.at(step))
        torch.where(bad > 0, self._flat, new.to(self._flat.dtype), out=self._flat)

    def row(self, value: float) -> Tensor:
        """A row of this value beside the weights, float32 or wider."""
        return torch.full_like(self._flat, value, dtype=self._arithmetic)

    def windows(self, row: Tensor) -> dict[str, Tensor]:
        """A row's windows by parameter name, each with its parameter's shape."""
        return dict(zip(self.parameters, self._windows(row), strict=True))

    def norms(self, row: Tensor) -> Tensor:
        """The norm of each parameter's part of a row."""
        return torch.stack(torch._foreach_norm(grain_norms(row).split([length // GRAIN for length in self.lengths])))

    def times(self, row: Tensor, factors: Tensor) -> Tensor:
        """A row of which each parameter's part is multiplied by its own factor."""
        # Grain by grain, because a row of repeated factors would be as large as the weights, and slow to make.
        return (row.view(-1, GRAIN) * factors[self._owners, None]).view(-1)

    def stacks(self, row: Tensor) -> list[Tensor]:
        """A row's windows as stacks of matrices, output by all else, one stack for each shape."""
        found, start = [], 0
        for shape, same in groupby(self.parameters.values(), key=lambda p: p.shape):
            count, each = len(list(same)), -(-shape.numel() // GRAIN) * GRAIN
            part = row[start : start + count * each].view(count, each)[:, : shape.numel()]
            found.append(part.unflatten(1, (shape[0], -1)))
            start += count * each
        return found

    @property
    def _arithmetic(self) -> torch.dtype:
        return torch.float32 if self._flat.dtype.itemsize < 4 else self._flat.dtype

    def _windows(self, row: Tensor) -> list[Tensor]:
        pieces = zip(row.split(self.lengths), self.parameters.values(), strict=True)
        return [_rolled(piece[: p.numel()], p.shape) for piece, p in pieces]


def grain_norms(row: Tensor) -> Tensor:
    """The norm of every grain of a row, of which norms over more are made: float32 loses a percent where the squares of
    a hundred million numbers are added up one after the other."""
    norms: Tensor = torch.linalg.vector_norm(row.view(-1, GRAIN), dim=1)
    return norms


def _unrolled(tensor: Tensor) -> Tensor:
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _rolled(piece: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    outputs, inputs, height, width = shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
