"""The operations of gram.py on a CUDA device, by Triton kernels."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from paceline.model.kernels import gram, rows_triton
from paceline.model.kernels.gram import Moments, Scatter, WidenedGradient
from paceline.model.kernels.gram_programs import (
    combine_moments_program,
    combine_scatter_program,
    input_gradient_added_program,
    input_gradient_program,
    product_moments_program,
    product_norm_program,
    product_norm_streaming_program,
    scatter_program,
    sum_parts_program,
)
from paceline.model.kernels.rows import Normed, NormNumbers
from paceline.model.kernels.rows_triton import MULTIPROCESSORS, Finish
from paceline.model.kernels.tiles import Tile, tile
from paceline.model.kernels.widened_programs import widened_gradient_program, widened_moments_program
from paceline.model.norm import SharedStatistics

WIDEST = 128
"""Up to so many channels one program holds a whole scatter matrix."""
ELEMENTS = 32
"""Numbers of a scatter matrix that one program adds up."""


def masked(dy: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a ReLU whose output is `out`, and its sums over the rows of each group."""
    unused = floats(dy, len(dy), dy.shape[2])
    sums, _, d = rows_triton.gradient_sums(dy, out, unused, unused, "relu", out=out)
    assert d is not None
    return d, sums.float()


def product_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Moments]:
    """y = x W^T, and its moments."""
    y, parts = _product_moments(x, weight)
    return y, parts.moments()


def product_normed(x: Tensor, weight: Tensor, numbers: NormNumbers) -> tuple[Tensor, Normed]:
    """y = x W^T, and what a norm makes of its moments."""
    y, parts = _product_moments(x, weight)
    return y, parts.normed(numbers)


def _product_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, _Parts]:
    (groups, rows, k), n = x.shape, len(weight)
    t = _tile(x, "product_moments", n, k)
    tiles, blocks = triton.cdiv(rows, t.rows), n // t.columns
    parts = part_count(groups * blocks, tiles, MULTIPROCESSORS * t.programs)
    y, sums = x.new_empty(groups, rows, n), floats(x, groups, parts, 3, n)
    product_moments_program[(groups * parts * blocks,)](
        x, weight, y, sums, rows, tiles, parts, n, k, t.rows, t.columns, t.inner, rows % t.rows == 0,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y, _Parts(sums, rows, tiles, t.rows, 16)


class _Parts(NamedTuple):
    """Pivots, sums and sums of squares of rows, as programs have left them."""

    sums: Tensor
    """[groups, programs, 3, channels]."""
    rows: int
    tiles: int
    height: int
    """Rows of a tile."""
    together: int
    """How many channels one program adds up."""

    def moments(self) -> Moments:
        """The moments of all rows of each group."""
        moments = self._room()
        self._combine(moments, None)
        return moments

    def normed(self, numbers: NormNumbers) -> Normed:
        """What a norm makes of the moments."""
        moments = self._room()
        finish = Finish.of(numbers, moments.mean)
        self._combine(moments, finish)
        return finish.normed(moments.mean)

    def _room(self) -> Moments:
        return Moments(*floats(self.sums, 2, len(self.sums), self.sums.shape[3]))

    def _combine(self, moments: Moments, finish: Finish | None) -> None:
        groups, count, _, n = self.sums.shape
        combine_moments_program[(n // self.together, groups)](
            self.sums, *moments, *Finish.pointers(finish), self.rows, self.tiles, count, *Finish.scalars(finish),
            n, self.height, 64, self.together, finish is not None, num_warps=4,
        )  # fmt: skip


def relu_scatter(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Scatter]:
    """relu(x scale + shift), and the scatter of that."""
    if x.shape[2] > WIDEST:
        y = rows_triton.scale_shift(x, scale, shift, "relu")
        return y, row_scatter(y)
    y = torch.empty_like(x)
    return y, _scatter(x, y, scale, shift)


def row_scatter(x: Tensor) -> Scatter:
    """The scatter of rows, whose channels come in eights."""
    return _scatter_by_product(x) if x.shape[2] > WIDEST else _scatter(x, x, None, None)


def _scatter_by_product(x: Tensor) -> Scatter:
    """The scatter of rows of many channels by torch's own product.

    It is taken around the mean of a few rows: what is left of 16 bits loses nothing that a sum of many rows would show.
    """
    groups, rows, channels = x.shape
    pivot = x[:, :: max(1, rows // 256)].float().mean(1).to(x.dtype)
    around = rows_triton.scale_shift(x, floats(x, groups, channels).fill_(1), -pivot.float(), None)
    mean, _ = rows_triton.moments(around)
    product = torch.bmm(around.transpose(1, 2), around, out_dtype=torch.float32)
    matrix = torch.baddbmm(product.double(), mean[:, :, None] * -rows, mean[:, None, :]).float()
    return Scatter((mean + pivot.double()).float(), matrix)


def _scatter(x: Tensor, y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Scatter:
    groups, rows, channels = x.shape
    padded, together = max(16, triton.next_power_of_2(channels)), 16 if channels % 16 == 0 else 8
    t = _tile(x, "relu_scatter", padded, 0)
    tiles = triton.cdiv(rows, t.rows)
    parts = part_count(groups, tiles, MULTIPROCESSORS * 2)
    sums, matrices = floats(x, groups, parts, 3, channels), floats(x, groups, parts, channels, channels)
    apply = scale is not None
    scatter_program[(groups * parts,)](
        x, y, scale if apply else x, shift if apply else x, sums, matrices, rows, tiles, parts, channels, padded,
        t.rows, apply, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    mean = _Parts(sums, rows, tiles, t.rows, together).moments().mean
    matrix = floats(x, groups, channels, channels)
    combine_scatter_program[(channels * channels // ELEMENTS, groups)](
        sums, matrices, mean, matrix, rows, tiles, parts, channels, t.rows, 64, ELEMENTS, num_warps=4
    )
    return Scatter(mean, matrix)


def widened_moments(weight: Tensor, scatter: Scatter, rows: int) -> tuple[Moments, Tensor]:
    """The moments of a W^T by the scatter of `rows` rows a; W times the scatter matrix comes with them."""
    moments = Moments(*floats(weight, 2, len(scatter.mean), len(weight)))
    return moments, _widened_moments(weight, scatter, rows, moments, None)


def widened_normed(weight: Tensor, scatter: Scatter, rows: int, numbers: NormNumbers) -> tuple[Normed, Tensor]:
    """What a norm makes of the moments of a W^T; W times the scatter matrix comes with it."""
    moments = Moments(*floats(weight, 2, len(scatter.mean), len(weight)))
    finish = Finish.of(numbers, moments.mean)
    weight_scatter = _widened_moments(weight, scatter, rows, moments, finish)
    return finish.normed(moments.mean), weight_scatter


def _widened_moments(weight: Tensor, scatter: Scatter, rows: int, moments: Moments, finish: Finish | None) -> Tensor:
    """Fill in the moments, and finish them; gives the weight times the scatter matrix."""
    (groups, channels), n = scatter.mean.shape, len(weight)
    weight_scatter = torch.matmul(weight.float(), scatter.matrix)
    widened_moments_program[(n // 8, groups)](
        weight, weight_scatter, scatter.mean, *moments, *Finish.pointers(finish), rows, n, *Finish.scalars(finish),
        channels, 8, 64, finish is not None, num_warps=4,
    )  # fmt: skip
    return weight_scatter


def product_norm(a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor) -> Tensor:
    """relu((a W^T) scale + shift + shortcut)."""
    return _product_norm("product_norm", a, weight, scale, shift, shortcut, shortcut, 0)


def product_norm_projected(
    a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, x: Tensor, projection: Tensor
) -> Tensor:
    """relu((a W^T) scale + shift + x V^T), where a projection V [groups, outputs, inputs] contains its norm's scale."""
    return _product_norm("product_norm_projected", a, weight, scale, shift, x, projection, x.shape[2])


def _product_norm(
    kernel: str, a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, x: Tensor, v: Tensor, inputs: int
) -> Tensor:
    (groups, rows, k), n = a.shape, len(weight)
    t = _tile(a, kernel, n, k)
    tiles, blocks = triton.cdiv(rows, t.rows), n // t.columns
    y = a.new_empty(groups, rows, n)
    if t.inner == k and inputs == 0:
        parts = part_count(groups * blocks, tiles, MULTIPROCESSORS * t.programs)
        product_norm_streaming_program[(groups * parts * blocks,)](
            a, weight, scale, shift, x, y, rows, tiles, parts, n, k, t.rows, t.columns, rows % t.rows == 0,
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers,
        )  # fmt: skip
        return y
    product_norm_program[(groups * tiles * blocks,)](
        a, weight, scale, shift, x, v, y, rows, tiles, n, k, inputs, t.rows, t.columns, t.inner, rows % t.rows == 0,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def weight_product(d: Tensor, a: Tensor) -> Tensor:
    """d^T a of each group: [groups, outputs, inputs]."""
    return torch.bmm(d.transpose(1, 2), a, out_dtype=torch.float32)


def widened_gradient(
    product: Tensor, sums: Tensor, weight: Tensor, scatter: Scatter, weight_scatter: Tensor, normed: Normed,
    rows: int, dtype: torch.dtype, shared: SharedStatistics | None = None,
) -> tuple[Tensor, Tensor, WidenedGradient]:  # fmt: skip
    """The gradients of the weight and bias of a norm behind a widening product, and those of the product."""
    if shared is not None:
        return gram.widened_gradient(product, sums, weight, scatter, weight_scatter, normed, rows, dtype, shared)
    groups, n, c = product.shape
    d_weight, d_gamma, d_beta = floats(product, n, c), floats(product, n), floats(product, n)
    scaled, weighted = torch.empty_like(product, dtype=dtype), torch.empty_like(product)
    constants = torch.empty_like(sums)
    widened_gradient_program[(n // 4,)](
        product, sums, weight, scatter.mean, weight_scatter, normed.mean, normed.inverse, normed.scale, d_weight,
        scaled, weighted, constants, d_gamma, d_beta, rows, groups, n, c, 4, 64, num_warps=4,
    )  # fmt: skip
    own = weight.float()
    q = torch.matmul(own.t(), weighted).to(dtype)
    return d_gamma, d_beta, WidenedGradient(d_weight, scaled, q, constants @ own)


def input_gradient(d: Tensor, a: Tensor, gradient: WidenedGradient) -> Tensor:
    """d A + a Q + c."""
    return _input_gradient("input_gradient", d, a, gradient, a)[0]


def input_gradient_masked(d: Tensor, a: Tensor, gradient: WidenedGradient, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z = d A + a Q + c where a > 0; with the sums of z and of z x over the rows of each group."""
    z, parts = _input_gradient("input_gradient_masked", d, a, gradient, x)
    sums, products = sum_parts(parts).transpose(0, 1).contiguous()  # what comes after reads group by group
    return z, sums, products


def _input_gradient(kernel: str, d: Tensor, a: Tensor, gradient: WidenedGradient, x: Tensor) -> tuple[Tensor, Tensor]:
    (groups, rows, k), n = d.shape, a.shape[2]
    t, summed = _tile(a, kernel, n, k), kernel == "input_gradient_masked"
    tiles, blocks = triton.cdiv(rows, t.rows), n // t.columns
    parts = part_count(groups * blocks, tiles, MULTIPROCESSORS * t.programs) if summed else tiles
    z, sums = torch.empty_like(a), floats(a, groups, parts, 2, n) if summed else gradient.c
    input_gradient_program[(groups * parts * blocks,)](
        d, gradient.a, a, gradient.q, gradient.c, x, z, sums, rows, tiles, parts, n, k, summed,
        t.rows, t.columns, t.inner, rows % t.rows == 0, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return z, sums


def input_gradient_added(d: Tensor, weight: Tensor, added: Tensor, x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """z = d W + added where x > 0, and its sums over the rows of each group; see the twin."""
    (groups, rows, k), n = d.shape, x.shape[2]
    t = _tile(x, "input_gradient_added", n, k)
    tiles, blocks = triton.cdiv(rows, t.rows), n // t.columns
    parts = part_count(groups * blocks, tiles, MULTIPROCESSORS * t.programs)
    z, sums = torch.empty_like(x), floats(x, groups, parts, n)
    input_gradient_added_program[(groups * parts * blocks,)](
        d, weight, added, x, z, sums, rows, tiles, parts, side, n, k, added.shape[1] != rows,
        t.rows, t.columns, t.inner, rows % t.rows == 0,
        num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers if t.inner == k else None,
    )  # fmt: skip
    return z, sum_parts(sums)


def _tile(x: Tensor, kernel: str, columns: int, inner: int) -> Tile:
    """The tile for a shape, no larger than the device's shared memory."""
    return tile(kernel, columns, inner, _shared_memory(x.device))


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 227 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def part_count(others: int, tiles: int, programs: int) -> int:
    """Into how many parts the tiles of a group are cut, so that with so many other programs there are enough."""
    return max(1, min(tiles, programs // others))


def floats(like: Tensor, *shape: int) -> Tensor:
    """Memory for float32 numbers on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def sum_parts(parts: Tensor) -> Tensor:
    """The sum over the second axis."""
    groups, count, *shape = parts.shape
    out = floats(parts, groups, *shape)
    n = out.numel() // groups
    width = 16 if n <= 4096 else 64
    sum_parts_program[(triton.cdiv(n, width), groups)](parts, out, count, n, 64, width, num_warps=4)
    return out
