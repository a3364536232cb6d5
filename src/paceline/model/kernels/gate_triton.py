"""The operations of gate.py on a CUDA device, by Triton kernels that add nothing atomically."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels import gate_programs as programs
from paceline.model.kernels.gate import Excite, GateSums
from paceline.model.kernels.rows_triton import MULTIPROCESSORS, WARPS
from paceline.settings.model import Activation

ELEMENTS = WARPS * 32 * 8
"""How many numbers a tile of sums has: one load of 16 bytes in bfloat16 for each thread."""
HIDDEN = 8
"""How many hidden numbers of squeeze-and-excite a program computes."""
RESIDENT = 3
"""How many programs that add up a multiprocessor should have to do."""


class _Tiles(NamedTuple):
    """How programs share [images, rows, channels]."""

    images: int
    """In each norm group."""
    total: int
    """In all groups."""
    rows: int
    """Of an image."""
    channels: int
    columns: int
    """Channels of a tile."""
    height: int
    """Rows of a tile."""

    @property
    def across(self) -> int:
        """How many tiles cover a row."""
        return -(-self.channels // self.columns)

    def chunks(self) -> tuple[int, int]:
        """How many chunks of rows an image is cut into to be added up, and how long one is, in whole tiles."""
        most = max(1, MULTIPROCESSORS * RESIDENT // (self.across * self.total))
        length = -(-self.rows // (most * self.height)) * self.height
        return -(-self.rows // length), length

    @property
    def grid(self) -> tuple[int, int]:
        """Programs of one tile each."""
        return -(-self.rows // self.height) * self.across, self.total


def image_means(x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int) -> Tensor:
    """The mean of y over the rows of each image; see the twin."""
    tiles = _tiles(x, images)
    return _over_chunks(_image_sums(x, scale, shift, activation, tiles), 1) / tiles.rows


def image_factors(
    x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int, excite: Excite
) -> Tensor:
    """The factors of squeeze-and-excite, by the means of y over the rows of each image; see the twin."""
    tiles, width = _tiles(x, images), len(excite.squeeze)
    sums = _image_sums(x, scale, shift, activation, tiles)
    hidden = sums.new_empty(images, width)
    programs.squeeze_of_image[(-(-width // HIDDEN), images)](
        sums, excite.squeeze, excite.squeeze_bias, hidden, tiles.rows, tiles.channels, sums.shape[1], width,
        ACTIVATION=excite.activation, BH=HIDDEN, BP=min(16, triton.next_power_of_2(sums.shape[1])), BC=128, num_warps=4,
    )  # fmt: skip
    factors = sums.new_empty(images, tiles.channels)
    programs.excite_of_image[(-(-tiles.channels // 64), images)](
        hidden, excite.excite, excite.excite_bias, factors, tiles.channels, width,
        GATE=excite.gate, BH=triton.next_power_of_2(width), BC=64, num_warps=4,
    )  # fmt: skip
    return factors


def _image_sums(x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, tiles: _Tiles) -> Tensor:
    """The sums of y over each chunk of an image's rows: [images, chunks, channels]."""
    chunks, length = tiles.chunks()
    partials = torch.empty((tiles.total, chunks, tiles.channels), dtype=torch.float32, device=x.device)
    programs.outputs_of_chunks[(chunks * tiles.across, tiles.total)](
        x, scale, shift, partials, tiles.rows, tiles.channels, length, tiles.images,
        ACTIVATION=activation, BR=tiles.height, BC=tiles.columns, num_warps=WARPS,
    )  # fmt: skip
    return partials


def gated(x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, gate: Tensor) -> Tensor:
    """y times the factor of its image and channel; see the twin."""
    assert x.is_contiguous()
    assert gate.is_contiguous()
    y, tiles = torch.empty_like(x), _tiles(x, len(gate), loads=2)
    programs.gated_of_tile[tiles.grid](
        x, y, scale, shift, gate, tiles.rows, tiles.channels, tiles.images,
        ACTIVATION=activation, BR=tiles.height, BC=tiles.columns, num_warps=WARPS,
    )  # fmt: skip
    return y


def gate_sums(
    d: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int
) -> GateSums:
    """What both the factors' gradient and the norm's are made of; see the twin."""
    assert d.is_contiguous()
    assert x.is_contiguous()
    assert mean.is_contiguous()
    tiles = _tiles(x, images)
    chunks, length = tiles.chunks()
    partials = torch.empty((5, images, chunks, tiles.channels), dtype=torch.float32, device=x.device)
    programs.gate_sums_of_chunks[(chunks * tiles.across, images)](
        d, x, mean, scale, shift, partials, tiles.rows, tiles.channels, length, tiles.images,
        ACTIVATION=activation, BR=tiles.height, BC=tiles.columns, num_warps=WARPS, maxnreg=80,
    )  # fmt: skip
    return GateSums(*_over_chunks(partials, 2))


def gated_gradient(
    d: Tensor, x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    gate: Tensor, term: Tensor, constants: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """a dz + b x + c, where dz is (d gate + term) times the slope of the activation; see the twin."""
    assert all(each.is_contiguous() for each in (d, x, gate, term, *constants))
    dx, tiles = torch.empty_like(x), _tiles(x, len(gate), loads=2)
    programs.gated_gradient_of_tile[tiles.grid](
        d, x, dx, scale, shift, gate, term, *constants, tiles.rows, tiles.channels, tiles.images,
        ACTIVATION=activation, BR=tiles.height, BC=tiles.columns, num_warps=WARPS, maxnreg=80,
    )  # fmt: skip
    return dx


def _tiles(x: Tensor, images: int, loads: int = 1) -> _Tiles:
    """Tiles in which each thread makes so many loads of 16 bytes; two share what they need of the channels."""
    groups, rows, channels = x.shape
    columns = min(128, channels & -channels)  # the largest power of two that divides it
    if columns < 32:
        columns = min(64, triton.next_power_of_2(channels))
    return _Tiles(images // groups, images, rows * groups // images, channels, columns, ELEMENTS * loads // columns)


def _over_chunks(partials: Tensor, axis: int) -> Tensor:
    return partials.squeeze(axis) if partials.shape[axis] == 1 else partials.sum(axis)
