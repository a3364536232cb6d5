"""Means over an image that do not depend on the order of adding, so that every device and batch size agrees."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCALE = float(1 << 20)
"""Pixels are rounded to 1 / SCALE before they are added: sums of integers are the same in any order."""


def exact_mean(values: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """The mean over these dimensions, which are kept with length 1."""
    count = math.prod(values.shape[dimension] for dimension in dimensions)
    total = (values * SCALE).round().to(torch.int64).sum(dimensions, keepdim=True)
    return total.to(values.dtype) / (count * SCALE)
