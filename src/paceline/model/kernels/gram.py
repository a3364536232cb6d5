"""Products of a bottleneck with the norms around them, in plain torch: the twins of what is in gram_triton.py.

Rows are [norm groups, rows of a group, channels], a row being a pixel of an image. A widening product y = a W^T needs
no look at y to be normalized: the mean and the scatter of the narrow rows `a` give its statistics before it is
computed. So product, norm, shortcut and ReLU are one pass, and nothing wide is read, written or kept for the norm's
sake, forward or backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.kernels.rows import Normed, NormNumbers, norm_constants
from paceline.model.norm import SharedStatistics


class Moments(NamedTuple):
    """Mean and biased variance of each channel in each norm group: [groups, channels]."""

    mean: Tensor
    var: Tensor


class Scatter(NamedTuple):
    """The mean [groups, channels] of rows, and the sum [groups, channels, channels] of (row - mean)^T (row - mean)."""

    mean: Tensor
    matrix: Tensor


class WidenedGradient(NamedTuple):
    """The gradient of a widening product's weight, and what turns the gradient d behind its norm into that of the
    narrow rows, d A + a Q + c: A is [groups, outputs, inputs], Q [groups, inputs, inputs] and c [groups, inputs]."""

    weight: Tensor
    a: Tensor
    q: Tensor
    c: Tensor


def wide(x: Tensor) -> Tensor:
    """Numbers to be summed over rows: in float32, or wider if they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Moments]:
    """y = x W^T, and its moments."""
    y = x @ weight.t()
    var, mean = torch.var_mean(wide(y), dim=1, correction=0)
    return y, Moments(mean, var)


def product_normed(x: Tensor, weight: Tensor, numbers: NormNumbers) -> tuple[Tensor, Normed]:
    """y = x W^T, and what a norm makes of its moments."""
    y, moments = product_moments(x, weight)
    return y, norm_constants(*moments, numbers, x.shape[1])


def relu_scatter(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Scatter]:
    """relu(x scale + shift), and the scatter of that."""
    y = torch.relu(wide(x) * scale[:, None] + shift[:, None]).to(x.dtype)
    return y, row_scatter(y)


def row_scatter(x: Tensor) -> Scatter:
    """The scatter of rows."""
    mean = wide(x).mean(1)
    centered = wide(x) - mean[:, None]
    return Scatter(mean, centered.transpose(1, 2) @ centered)


def widened_moments(weight: Tensor, scatter: Scatter, rows: int) -> tuple[Moments, Tensor]:
    """The moments of a W^T by the scatter of `rows` rows a; W times the scatter matrix comes with them."""
    weight_scatter = wide(weight) @ scatter.matrix
    var = (weight_scatter * wide(weight)).sum(2).clamp_min(0) / rows
    return Moments(scatter.mean @ wide(weight).t(), var), weight_scatter


def widened_normed(weight: Tensor, scatter: Scatter, rows: int, numbers: NormNumbers) -> tuple[Normed, Tensor]:
    """What a norm makes of the moments of a W^T; W times the scatter matrix comes with it."""
    moments, weight_scatter = widened_moments(weight, scatter, rows)
    return norm_constants(*moments, numbers, rows), weight_scatter


def product_norm(a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor) -> Tensor:
    """relu((a W^T) scale + shift + shortcut)."""
    y = wide(a @ weight.t()) * scale[:, None] + shift[:, None] + wide(shortcut)
    return torch.relu(y).to(a.dtype)


def product_norm_projected(
    a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, x: Tensor, projection: Tensor
) -> Tensor:
    """relu((a W^T) scale + shift + x V^T), where a projection V [groups, outputs, inputs] contains its norm's scale."""
    y = wide(a @ weight.t()) * scale[:, None] + shift[:, None] + wide(x @ projection.transpose(1, 2))
    return torch.relu(y).to(a.dtype)


def masked(dy: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a ReLU whose output is `out`, and its sums over the rows of each group."""
    d = torch.where(out > 0, dy, 0)
    return d, wide(d).sum(1)


def weight_product(d: Tensor, a: Tensor) -> Tensor:
    """d^T a of each group: [groups, outputs, inputs]."""
    return wide(d).transpose(1, 2) @ wide(a)


def widened_gradient(
    product: Tensor, sums: Tensor, weight: Tensor, scatter: Scatter, weight_scatter: Tensor, normed: Normed,
    rows: int, dtype: torch.dtype, shared: SharedStatistics | None = None,
) -> tuple[Tensor, Tensor, WidenedGradient]:  # fmt: skip
    """The gradients of the weight and bias of a norm behind a widening product, and those of the product, by d^T a and
    the sums of d. What the data are multiplied by is of their type.

    `rows` counts this replica's rows of a group, whose own mean differs from the group's where replicas share it.
    """
    own = wide(weight)
    centered = product - sums[..., None] * scatter.mean[:, None]
    offset = scatter.mean @ own.t() - normed.mean
    deviations = (centered * own).sum(2) + offset * sums  # the sums of d (y - mean)
    total, count = torch.stack([sums, deviations]), rows
    if shared is not None:
        total, count = shared.all_reduce(total.clone()), rows * shared.count
    m1, m2 = total[0] / count, total[1] * normed.inverse.square() / count
    # Before the norm the gradient is scale (d - m1 - (y - mean) m2).
    rest = sums - rows * (m1 + m2 * offset)
    by_rows = centered + rest[..., None] * scatter.mean[:, None] - m2[..., None] * weight_scatter
    scaled = normed.scale[..., None] * own
    q = -(own.t() @ (m2[..., None] * scaled))
    c = (normed.scale * (m2 * normed.mean - m1)) @ own
    d_weight = (normed.scale[..., None] * by_rows).sum(0)
    widened = WidenedGradient(d_weight, scaled.to(dtype), q.to(dtype), c)
    return (normed.inverse * deviations).sum(0), sums.sum(0), widened


def input_gradient(d: Tensor, a: Tensor, gradient: WidenedGradient) -> Tensor:
    """d A + a Q + c."""
    return (wide(d @ gradient.a) + wide(a @ gradient.q) + gradient.c[:, None]).to(d.dtype)


def input_gradient_masked(d: Tensor, a: Tensor, gradient: WidenedGradient, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z = d A + a Q + c where a > 0: the gradient before the ReLU that made `a`; with the sums of z and of z x over the
    rows of each group, x being what the norm before that ReLU took."""
    z = torch.where(a > 0, input_gradient(d, a, gradient), 0)
    return z, wide(z).sum(1), (wide(z) * wide(x)).sum(1)


def input_gradient_added(d: Tensor, weight: Tensor, added: Tensor, x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """z = d W + added where x > 0, and its sums over the rows of each group.

    Where `added` has fewer rows, they belong to every other pixel, both ways, of pictures of this side.
    """
    z = wide(d @ weight)
    if added.shape[1] == z.shape[1]:
        z = z + wide(added)
    else:
        pictures = z.view(-1, side, side, z.shape[2])
        half = (side + 1) // 2
        pictures[:, ::2, ::2] += wide(added).reshape(len(pictures), half, half, -1)
    z = torch.where(x > 0, z, 0).to(d.dtype)
    return z, wide(z).sum(1)
