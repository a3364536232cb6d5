"""Batch norm, mask, shortcut and activation over the rows of norm groups, in plain torch: the twin of `rows_triton`.

Data are [groups, rows, channels], a view of images in channels-last order: a group's rows are all pixels of its images.
What belongs to a channel is [groups, channels] in float32 or float64. A mask is [groups, images], one factor for all
rows of an image. Arithmetic is in float32 or wider, and results are stored in the type of `x`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.settings.model import Activation


class Normed(NamedTuple):
    """What both passes need of a norm: [groups, channels] each."""

    mean: Tensor
    inverse: Tensor
    """One over the standard deviation."""
    scale: Tensor
    shift: Tensor


class NormNumbers(NamedTuple):
    """What a batch norm makes its constants of, beside the moments of its groups."""

    weight: Tensor
    bias: Tensor
    epsilon: float
    slots: tuple[Tensor, Tensor]
    """Where the mean and the unbiased variance of each group go."""


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel in each group."""
    var, mean = torch.var_mean(widened(x), dim=1, correction=0)
    return mean, var


def normed_moments(x: Tensor, numbers: NormNumbers) -> Normed:
    """What a norm makes of the moments of each group."""
    return norm_constants(*moments(x), numbers, x.shape[1])


def norm_constants(mean: Tensor, var: Tensor, numbers: NormNumbers, count: int) -> Normed:
    """What a norm over `count` rows makes of its moments."""
    weight, bias, epsilon, slots = numbers
    return Normed(mean, *forward_constants(mean, var, weight, bias, epsilon, count, slots))


def scale_shift(
    x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    shortcut: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act((x * scale + shift) * mask + shortcut)."""
    return activate(_before_activation(x, scale, shift, shortcut, mask), activation).to(x.dtype)


def gradient_sums(
    dy: Tensor, x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    shortcut: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The sums over rows of mask * dz and of mask * dz * x, dz the gradient before the activation; and dz itself.

    Only a shortcut needs dz, whose gradient it is: without one it is None. `out`, what `scale_shift` gave with a
    shortcut, is enough in its place for ReLU and ReLU6.
    """
    d = widened(dy)
    if activation in ("relu", "relu6") and out is not None:
        d = d * slope(widened(out), activation)
    elif activation is not None:
        d = d * slope(_before_activation(x, scale, shift, shortcut, mask), activation)
    dz = None if shortcut is out is None else dy if activation is None else d.to(x.dtype)
    # What comes after reads dz as it is stored, so the sums are of just that.
    d = _masked(d if dz is None else widened(dz), mask)
    return d.sum(1, dtype=torch.float64), (d * widened(x)).sum(1, dtype=torch.float64), dz


def norm_gradient(
    d: Tensor, x: Tensor, scale: Tensor, shift: Tensor, a: Tensor, b: Tensor, c: Tensor,
    activation: Activation | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a * mask * dz + b * x + c, where dz is d behind the activation of (x * scale + shift) * mask, if there is one."""
    dz = widened(d)
    if activation is not None:
        dz = dz * slope(_before_activation(x, scale, shift, None, mask), activation)
    return (a[:, None] * _masked(dz, mask) + b[:, None] * widened(x) + c[:, None]).to(x.dtype)


def forward_constants(
    mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, epsilon: float,
    count: int, slots: tuple[Tensor, Tensor], replicas: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """1 / sqrt(var + epsilon), and the scale and shift of a norm over `count` rows.

    The mean and unbiased variance of each group go to its slots, divided by the number of replicas that share it.
    """
    slots[0].copy_(mean / replicas)
    slots[1].copy_(var * (count / max(1, count - 1) / replicas))
    inverse = torch.rsqrt(var + epsilon)
    scale = weight * inverse
    return inverse, scale, bias - mean * scale


def backward_constants(
    sums: Tensor, moments: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The factors a, b and c of `norm_gradient`, and the gradients of weight and bias, of a norm over `count` rows."""
    normal_sums = inverse * (moments - mean * sums)
    a = weight * inverse
    b = -a * inverse * normal_sums / count
    c = -a * sums / count - b * mean
    return a, b.to(a.dtype), c.to(a.dtype), normal_sums.sum(0).to(weight.dtype), sums.sum(0).to(weight.dtype)


def widened(x: Tensor) -> Tensor:
    """Numbers in float32, or wider if they are."""
    return x if x.dtype == torch.float64 else x.float()


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Each image's rows times its factor."""
    if mask is None:
        return x
    images = x.view(len(x), mask.shape[1], -1, x.shape[2])
    return (images * mask[:, :, None, None]).view(x.shape)


def _before_activation(x: Tensor, scale: Tensor, shift: Tensor, shortcut: Tensor | None, mask: Tensor | None) -> Tensor:
    y = _masked(widened(x) * scale[:, None] + shift[:, None], mask)
    return y if shortcut is None else y + shortcut


def activate(x: Tensor, activation: Activation | None) -> Tensor:
    """An activation, in memory of its own."""
    match activation:
        case None:
            return x
        case "relu":
            return F.relu(x)
        case "relu6":
            return F.relu6(x)
        case "silu":
            return F.silu(x)
        case "hardswish":
            return F.hardswish(x)


def slope(x: Tensor, activation: Activation) -> Tensor:
    """The derivative of an activation where its input is x; for ReLU and ReLU6, the output will do as well."""
    match activation:
        case "relu":
            return (x > 0).to(x.dtype)
        case "relu6":
            return ((x > 0) & (x < 6)).to(x.dtype)
        case "silu":
            sigmoid = torch.sigmoid(x)
            return sigmoid * (1 + x * (1 - sigmoid))
        case "hardswish":
            return torch.where(x < -3, 0.0, torch.where(x <= 3, x / 3 + 0.5, 1.0))
