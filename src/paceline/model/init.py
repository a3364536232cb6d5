"""Initial weights: made on the host from numbers keyed by the seed and the parameter's own name."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import keyed
from paceline.model.norm import NormAct
from paceline.settings.model import (
    AlexNet,
    EfficientNet,
    GoogLeNet,
    InceptionResNetV2,
    InceptionV3,
    InceptionV4,
    MobileNetV2,
    MobileNetV3,
    Model,
    Vgg,
)
from paceline.settings.recipe import Init

_ZEROED = {
    "none": (),
    "residual": ("branch", "projected-branch"),
    "identity": ("branch",),
    "one-branch": ("branch", "projection"),
}
"""Which roles of norms start with a scale of zero."""


_PUBLISHED: dict[type[Model], tuple[str, str]] = {
    AlexNet: ("uniform-fan-in", "uniform-fan-in"),
    Vgg: ("he-fan-out", "normal-0.01"),
    GoogLeNet: ("normal-0.01", "normal-0.01"),
    InceptionV3: ("normal-0.1", "normal-0.1"),
    InceptionV4: ("uniform-fan-in", "uniform-fan-in"),
    InceptionResNetV2: ("uniform-fan-in", "uniform-fan-in"),
    EfficientNet: ("he-fan-out", "uniform-fan-out"),
    MobileNetV2: ("he-fan-out", "normal-0.01"),
    MobileNetV3: ("he-fan-out", "normal-0.01"),
}
"""How torchvision's or timm's network of the family starts its convolutions and dense layers."""


def published(init: Init, model: Model) -> Init:
    """The initialization with 'published' replaced by what the network was published with.

    A new head beside weights from elsewhere starts small: drawn by its few classes, it would drown what they know.
    """
    conv, dense = _PUBLISHED.get(type(model), ("he-fan-out", "uniform-fan-in"))
    if init.from_ is not None and dense == "uniform-fan-out":
        dense = "normal-0.01"
    update = {
        "conv": conv if init.conv == "published" else init.conv,
        "dense": dense if init.dense == "published" else init.dense,
    }
    return init.model_copy(update=update)


@torch.no_grad()
def initialize(module: nn.Module, init: Init, seed: int) -> None:
    """Set every parameter of a network; the same bits on every machine and placement."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            kind = init.conv if isinstance(layer, nn.Conv2d) else init.dense
            _set(layer.weight, _weights(kind, layer, seed, f"{name}.weight"))
            if layer.bias is not None:
                _bias(layer.bias, layer.weight[0].numel(), kind, seed, name)
        elif isinstance(layer, NormAct):
            layer.weight.fill_(0.0 if layer.role in _ZEROED[init.zero_gamma] else 1.0)
            for parameter in [p for key, p in layer.named_parameters() if key != "weight"]:
                parameter.zero_()


def _weights(kind: str, layer: nn.Conv2d | nn.Linear, seed: int, name: str) -> NDArray[np.float64]:
    """The initial weights of a convolution, or of a dense layer, which is one with a window of one pixel."""
    outputs, inputs, *window = layer.weight.shape
    area = math.prod(window)
    fan_in, fan_out = inputs * area, outputs * area
    key, count = keyed.key(seed, "weights", name), layer.weight.numel()
    match kind:
        case "he-fan-out":
            return keyed.normals(key, count) * math.sqrt(2 / fan_out)
        case "he-fan-in":
            return keyed.normals(key, count) * math.sqrt(2 / fan_in)
        case "he-mixed":
            grouped = isinstance(layer, nn.Conv2d) and layer.groups > 1
            return keyed.normals(key, count) * math.sqrt(2 / (fan_in if grouped else fan_out))
        case "truncated-fan-in":
            # A normal cut at two deviations has a deviation of 0.8796; TensorFlow widens it to keep the variance.
            return keyed.normals(key, count, limit=2.0) * math.sqrt(1 / fan_in) / 0.87962566103423978
        case "glorot-uniform":
            return _uniform(key, count, math.sqrt(6 / (fan_in + fan_out)))
        case "uniform-fan-in":
            return _uniform(key, count, 1 / math.sqrt(fan_in))
        case "uniform-fan-out":
            return _uniform(key, count, 1 / math.sqrt(fan_out))
        case _:
            return keyed.normals(key, count) * float(kind.removeprefix("normal-"))


def _bias(bias: Tensor, inputs: int, kind: str, seed: int, name: str) -> None:
    """Set a bias to zero, or as torch does by default."""
    bias.zero_()
    if kind == "uniform-fan-in":
        _set(bias, _uniform(keyed.key(seed, "weights", f"{name}.bias"), len(bias), 1 / math.sqrt(inputs)))


def _uniform(key: int, count: int, limit: float) -> NDArray[np.float64]:
    return (keyed.host_uniforms(key, count) * 2 - 1) * limit


def _set(parameter: Tensor, values: NDArray[np.float64]) -> None:
    parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
