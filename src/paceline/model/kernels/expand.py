"""A 1x1 convolution that widens, its norm and its activation, in plain torch: the twins of expand_triton.py.

Rows are [norm groups, rows of a group, channels]. With z = (x W^T) scale + shift, the output is act(z). The norm's
scale and shift follow from the rows of x alone (gram.py), so z is never written: the backward pass computes it again
from x, which is a few times narrower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.kernels.gram import WidenedGradient, input_gradient, wide
from paceline.model.kernels.product import product_act as expanded
from paceline.model.kernels.rows import slope
from paceline.settings.model import Activation

__all__ = ["expanded", "expansion_gradient", "expansion_sums"]


def expansion_sums(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None
) -> tuple[Tensor, Tensor]:
    """dz^T x and the sums of dz of each group, dz being the gradient before the activation."""
    dz = wide(_before(dy, x, weight, scale, shift, activation))
    return dz.transpose(1, 2) @ wide(x), dz.sum(1)


def expansion_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    gradient: WidenedGradient,
) -> Tensor:  # fmt: skip
    """The gradient of x: dz A + x Q + c."""
    return input_gradient(_before(dy, x, weight, scale, shift, activation), x, gradient)


def _before(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None
) -> Tensor:
    """dz in the type of the data, as it is multiplied."""
    z = wide(x) @ wide(weight).t() * scale[:, None] + shift[:, None]
    steep = torch.ones_like(z) if activation is None else slope(z, activation)
    return (wide(dy) * steep).to(x.dtype)
