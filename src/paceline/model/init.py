"""Initial weights: made on the host from numbers keyed by the seed and the parameter's own name."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import keyed
from paceline.model.norm import NormAct
from paceline.recipe import Init

_ZEROED = {
    "none": (),
    "residual": ("branch", "projected-branch"),
    "identity": ("branch",),
    "one-branch": ("branch", "projection"),
}
"""Which roles of norms start with a scale of zero."""


@torch.no_grad()
def initialise(module: nn.Module, init: Init, seed: int) -> None:
    """Set every parameter of a network; the same bits on every machine and placement."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d):
            _put(part.weight, _conv(init.conv, part.weight, seed, f"{name}.weight"))
        elif isinstance(part, nn.Linear):
            _dense(init.dense, part, seed, name)
        elif isinstance(part, NormAct):
            part.weight.fill_(0.0 if part.role in _ZEROED[init.zero_gamma] else 1.0)
            part.bias.zero_()


def _conv(kind: str, weight: Tensor, seed: int, name: str) -> NDArray[np.float64]:
    outputs, inputs, *window = weight.shape
    area = math.prod(window)
    fan_in, fan_out = inputs * area, outputs * area
    key, count = keyed.key(seed, "weights", name), weight.numel()
    match kind:
        case "he-fan-out":
            return keyed.normals(key, count) * math.sqrt(2 / fan_out)
        case "he-fan-in":
            return keyed.normals(key, count) * math.sqrt(2 / fan_in)
        case "truncated-fan-in":
            # A normal cut at two deviations has a spread of 0.8796; TensorFlow widens it to keep the variance.
            return keyed.normals(key, count, limit=2.0) * math.sqrt(1 / fan_in) / 0.87962566103423978
        case _:
            return _uniform(key, count, math.sqrt(6 / (fan_in + fan_out)))


def _dense(kind: str, part: nn.Linear, seed: int, name: str) -> None:
    outputs, inputs = part.weight.shape
    key, count = keyed.key(seed, "weights", f"{name}.weight"), part.weight.numel()
    part.bias.zero_()
    match kind:
        case "uniform-fan-in":
            limit = 1 / math.sqrt(inputs)
            _put(part.weight, _uniform(key, count, limit))
            _put(part.bias, _uniform(keyed.key(seed, "weights", f"{name}.bias"), outputs, limit))
        case "glorot-uniform":
            _put(part.weight, _uniform(key, count, math.sqrt(6 / (inputs + outputs))))
        case _:
            _put(part.weight, keyed.normals(key, count) * 0.01)


def _uniform(key: int, count: int, limit: float) -> NDArray[np.float64]:
    return (keyed.host_uniforms(key, count) * 2 - 1) * limit


def _put(parameter: Tensor, values: NDArray[np.float64]) -> None:
    parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
