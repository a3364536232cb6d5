"""`rows` in Triton, for CUDA: as few passes over the data as there can be, and the same bits every time.

Sums are taken in two steps: each program adds up a chunk of rows and writes what it has, then a small kernel adds up
the chunks in float64. A chunk's sums are of differences from its first row, so a mean far from zero costs no digits.
How rows are cut depends on the shape alone, and nothing is added atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels import rows_programs as programs
from paceline.model.kernels.rows import Normed, NormNumbers
from paceline.settings.model import Activation

MULTIPROCESSORS = 132
"""What an H200 has. Sums are shared among as many programs as run there at once: more would wait, and be more to add up
in the end; on other devices the sums are the same."""
RESIDENT = {64: 4, 80: 3}
"""How many programs a multiprocessor can hold, by the number of registers that a thread has."""
WARPS = 8
"""How many warps a program has."""
COLUMNS = 64
"""Rows of fewer channels are folded until their length is a multiple of this: 128 bytes, a cache line of bfloat16."""


class Finish(NamedTuple):
    """What a kernel that gives moments does with them in the end: a norm's constants, see `write_constants`."""

    numbers: NormNumbers
    inverse: Tensor
    scale: Tensor
    shift: Tensor
    """Behind the scale in memory."""

    @classmethod
    def of(cls, numbers: NormNumbers, mean: Tensor) -> Finish:
        """For a norm with these numbers and means like these: the inverse like them, scale and shift in float32."""
        return cls(numbers, *constants_like(mean))

    def normed(self, mean: Tensor) -> Normed:
        """What both passes need."""
        return Normed(mean, self.inverse, self.scale, self.shift)

    @staticmethod
    def pointers(finish: Finish | None) -> Sequence[Tensor | None]:
        """The kernel's arguments that point to memory."""
        if finish is None:
            return [None] * 6
        (weight, bias, _, slots), inverse, scale, _ = finish
        assert slots[0].stride() == slots[1].stride()
        return weight, bias, inverse, scale, *slots

    @staticmethod
    def scalars(finish: Finish | None) -> tuple[int, float]:
        """The kernel's other arguments for this: how far apart the slots of two groups are, and epsilon."""
        return (0, 0.0) if finish is None else (finish.numbers.slots[0].stride(0), finish.numbers.epsilon)


class Tiles(NamedTuple):
    """How a kernel cuts [groups, rows, channels]."""

    fold: int
    """How many rows, side by side, make one."""
    rows: int
    """How many rows a group has after that."""
    width: int
    """How many columns such a row has."""
    height: int
    """How many rows a tile has."""
    columns: int
    """How many columns a tile has."""

    @property
    def across(self) -> int:
        """How many tiles cover a row."""
        return -(-self.width // self.columns)

    @property
    def lanes(self) -> int:
        """How many columns of a channel one program can add up by itself."""
        return self.fold if self.fold > 1 and self.columns == self.width else 1

    @property
    def together(self) -> int:
        """The power of two, at most 8, that divides the number of channels; 0 where rows are not folded."""
        channels = self.width // self.fold
        return min(8, channels & -channels) if self.fold > 1 else 0

    def even(self, step: int) -> bool:
        """Whether steps of so many rows, and tiles of columns, leave nothing over."""
        return self.rows % step == 0 and self.width % self.columns == 0

    def chunks(self, groups: int, step: int, registers: int) -> tuple[int, int]:
        """How many chunks of rows a group is cut into to be added up, and how long one is, in whole steps."""
        most = max(1, MULTIPROCESSORS * RESIDENT[registers] // (self.across * groups))
        length = -(-self.rows // (most * step)) * step
        return -(-self.rows // length), length


def tiles_of(x: Tensor, mask: Tensor | None, loads: int) -> Tiles:
    """Tiles for x in which each thread of a program makes so many loads of 16 bytes."""
    _, rows, channels = x.shape
    together = rows if mask is None else rows // mask.shape[1]  # a folded row has one factor
    fold = 1
    while fold * channels % COLUMNS and together % (2 * fold) == 0:
        fold *= 2
    width = fold * channels
    columns = min(128, width & -width)  # the largest power of two that divides it
    if columns < 32:
        columns = min(COLUMNS, triton.next_power_of_2(width))
    elements = WARPS * 32 * (16 // x.element_size()) * loads
    return Tiles(fold, rows // fold, width, elements // columns, columns)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel in each group, in float64."""
    mean, var = _added_up(_moments_of_chunks(x), x.shape[2], x.shape[1])
    return mean, var


def normed_moments(x: Tensor, numbers: NormNumbers) -> Normed:
    """What a norm makes of the moments of each group; see the twin."""
    partials = _moments_of_chunks(x)
    totals = partials.new_empty((2, len(x), x.shape[2]))
    finish = Finish.of(numbers, totals[0])
    _add_up(partials, totals, x.shape[2], x.shape[1], finish)
    return finish.normed(totals[0])


def _moments_of_chunks(x: Tensor) -> Tensor:
    """The sums of x and of x * x over chunks of rows."""
    assert x.is_contiguous()
    tiles, unroll = tiles_of(x, None, loads=1), 4
    step = tiles.height * unroll
    chunks, length = tiles.chunks(len(x), step, registers=64)
    partials = _partials(x, tiles, chunks)
    programs.moments_of_chunks[(chunks * tiles.across, len(x))](
        x, partials, tiles.rows, tiles.width, length,
        EVEN=tiles.even(step), LANES=tiles.lanes, BR=tiles.height, BC=tiles.columns, UNROLL=unroll,
        num_warps=WARPS, maxnreg=64,
    )  # fmt: skip
    return partials


def scale_shift(
    x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    shortcut: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act((x * scale + shift) * mask + shortcut)."""
    assert all(each is None or each.is_contiguous() for each in (x, scale, shift, shortcut, mask))
    y, tiles = torch.empty_like(x), tiles_of(x, mask, loads=2)
    programs.scale_shift_of_tile[(-(-tiles.rows // tiles.height) * tiles.across, len(x))](
        x, shortcut, y, scale, shift, mask, tiles.rows, tiles.width, x.shape[2], _images(mask),
        ACTIVATION=activation, SHORTCUT=shortcut is not None, MASKED=mask is not None, FOLDED=tiles.together,
        EVEN=tiles.even(tiles.height), BR=tiles.height, BC=tiles.columns, num_warps=WARPS,
    )  # fmt: skip
    return y


def gradient_sums(
    dy: Tensor, x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    shortcut: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The sums over rows of mask * dz and of mask * dz * x in float64, and dz beside a shortcut; see the twin."""
    assert all(each is None or each.is_contiguous() for each in (dy, x, scale, shift, shortcut, mask, out))
    tiles, registers = tiles_of(x, mask, loads=1), 80 if activation in ("silu", "hardswish") else 64
    chunks, length = tiles.chunks(len(x), tiles.height, registers)
    partials = _partials(x, tiles, chunks)
    source, beside = None, None
    if activation is not None and out is not None and activation in ("relu", "relu6"):
        source, beside = "out", out
    elif activation is not None and shortcut is not None:
        source, beside = "shortcut", shortcut
    dz = None if shortcut is out is None else dy if activation is None else torch.empty_like(x)
    programs.gradients_of_chunks[(chunks * tiles.across, len(x))](
        dy, x, beside, dz, scale, shift, mask, partials, tiles.rows, tiles.width, x.shape[2], length, _images(mask),
        ACTIVATION=activation, BESIDE=source, WRITE=activation is not None and dz is not None,
        MASKED=mask is not None, FOLDED=tiles.together,
        EVEN=tiles.even(tiles.height), LANES=tiles.lanes, BR=tiles.height, BC=tiles.columns,
        num_warps=WARPS, maxnreg=registers,
    )  # fmt: skip
    sums, products = _added_up(partials, x.shape[2])
    return sums, products, dz


def norm_gradient(
    d: Tensor, x: Tensor, scale: Tensor, shift: Tensor, a: Tensor, b: Tensor, c: Tensor,
    activation: Activation | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a * mask * dz + b * x + c, where dz is d behind the activation of (x * scale + shift) * mask, if there is one."""
    assert all(each is None or each.is_contiguous() for each in (d, x, scale, shift, a, b, c, mask))
    dx, tiles = torch.empty_like(x), tiles_of(x, mask, loads=2)
    programs.norm_gradient_of_tile[(-(-tiles.rows // tiles.height) * tiles.across, len(x))](
        d, x, dx, scale, shift, a, b, c, mask, tiles.rows, tiles.width, x.shape[2], _images(mask),
        ACTIVATION=activation, MASKED=mask is not None, FOLDED=tiles.together,
        EVEN=tiles.even(tiles.height), BR=tiles.height, BC=tiles.columns, num_warps=WARPS,
    )  # fmt: skip
    return dx


def forward_constants(
    mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, epsilon: float,
    count: int, slots: tuple[Tensor, Tensor], replicas: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """1 / sqrt(var + epsilon) in float64, the scale and shift of a norm in float32, and its slots; see the twin."""
    assert slots[0].stride() == slots[1].stride()
    assert mean.is_contiguous()
    assert var.is_contiguous()
    groups, channels = mean.shape
    inverse, scale, shift = constants_like(mean)
    programs.forward_constants_of_channels[(-(-channels // 128), groups)](
        mean, var, weight, bias, inverse, scale, *slots, channels, slots[0].stride(0), epsilon, count, replicas,
        BC=128, num_warps=4,
    )  # fmt: skip
    return inverse, scale, shift


def backward_constants(
    sums: Tensor, moments: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The factors a, b and c of `norm_gradient` in float32, and the gradients of weight and bias; see the twin."""
    assert all(each.is_contiguous() for each in (sums, moments, mean, inverse))
    groups, channels = sums.shape
    a, b, c = torch.empty((3, groups, channels), dtype=torch.float32, device=sums.device)
    dweight, dbias = torch.empty((2, channels), dtype=weight.dtype, device=sums.device)
    programs.backward_constants_of_channels[(-(-channels // 16),)](
        sums, moments, mean, inverse, weight, a, dweight, dbias, groups, channels, count,
        BG=min(32, triton.next_power_of_2(groups)), BC=16, num_warps=4,
    )  # fmt: skip
    return a, b, c, dweight, dbias


def constants_like(mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what a norm makes of means like these: the inverse, the scale and the shift behind it."""
    scale, shift = torch.empty((2, *mean.shape), dtype=torch.float32, device=mean.device)
    return torch.empty_like(mean), scale, shift


def _images(mask: Tensor | None) -> int:
    return 1 if mask is None else mask.shape[1]


def _partials(x: Tensor, tiles: Tiles, chunks: int) -> Tensor:
    """Room for two sums of each chunk and column: [2, groups, chunks, columns that are kept]."""
    return torch.empty((2, len(x), chunks, tiles.width // tiles.lanes), dtype=torch.float64, device=x.device)


def _added_up(partials: Tensor, channels: int, count: int | None = None) -> Tensor:
    """Both sums over all chunks; with a count, the mean and variance that they give."""
    totals = partials.new_empty((2, partials.shape[1], channels))
    _add_up(partials, totals, channels, count)
    return totals


def _add_up(partials: Tensor, totals: Tensor, channels: int, count: int | None, finish: Finish | None = None) -> None:
    """Fill in both sums over all chunks, or with a count the moments that they give, and finish these."""
    _, groups, chunks, width = partials.shape
    chunks = chunks * width // channels  # a folded row is several rows here
    programs.sums_of_chunks[(-(-channels // 8), groups)](
        partials, totals, *Finish.pointers(finish), chunks, channels, count or 0,
        *Finish.scalars(finish), MOMENTS=count is not None, NORMED=finish is not None,
        BP=min(128, max(16, triton.next_power_of_2(chunks))), BC=8, num_warps=4,
    )  # fmt: skip
