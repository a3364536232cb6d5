"""A 1x1 convolution, its norm, a shortcut and the activation, in plain torch: the twin of product_triton.py.

Data are rows [norm groups, rows of a group, channels], and scale and shift are [norm groups, channels]. Arithmetic
behind the product is in float32 or wider.
"""

from __future__ import annotations

from torch import Tensor

from paceline.model.kernels.rows import activate, widened
from paceline.settings.model import Activation


def product_act(
    a: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    shortcut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act(a W^T scale + shift + shortcut)."""
    y = widened(a) @ widened(weight).T * scale[:, None] + shift[:, None]
    return activate(y if shortcut is None else y + shortcut, activation).to(a.dtype)
