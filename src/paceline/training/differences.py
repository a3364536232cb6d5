"""How far apart tensors are, and what a difference is measured beside."""

from __future__ import annotations

import math

from torch import Tensor

NEGLIGIBLE = 1e-13
"""A tensor with no number above this fraction of the largest of its kind is nothing but rounding, and is compared with
that largest: the bias of a convolution before a norm is one, whose gradient is zero."""


def relative_difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """The largest |a - b| over the largest |a|, or over `scale` if that is larger."""
    difference = magnitude(a.double() - b.double())
    if not math.isfinite(difference):
        return math.inf  # what is not a number agrees with nothing
    return difference and difference / max(magnitude(a), scale, 1e-300)


def state_scales(tensors: dict[str, Tensor]) -> dict[str, float]:
    """What differences of a state's tensors are measured beside, where that is more than their own largest number."""
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), magnitude(tensor))
    scales = {}
    for name, tensor in tensors.items():
        scales[name] = largest[_kind(name)] if magnitude(tensor) <= NEGLIGIBLE * largest[_kind(name)] else 0.0
        if name.endswith("running_mean"):  # as exact as the numbers that it is the mean of, however near to zero
            variance = tensors.get(name.replace("running_mean", "running_var"))
            scales[name] = scales[name] if variance is None else math.sqrt(magnitude(variance))
    return scales


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value."""
    low, high = tensor.detach().aminmax()  # one pass, and NaN if there is one
    return max(abs(float(low)), abs(float(high)))


def _kind(name: str) -> str:
    """Running means, running variances, each state of the optimizer, or weights."""
    last = name.rpartition(".")[2]
    return "weight" if last == "bias" else last
