"""Shapes of EfficientNets and MobileNets as plain numbers, for building and for planning (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PlanError
from paceline.settings.model import Activation, EfficientNet, Mobile, MobileNetV2, MobileNetV3

EFFICIENTNETS: dict[str, tuple[float, float, float]] = {
    "efficientnet-b0": (1.0, 1.0, 0.2),
    "efficientnet-b1": (1.0, 1.1, 0.2),
    "efficientnet-b2": (1.1, 1.2, 0.3),
    "efficientnet-b3": (1.2, 1.4, 0.3),
    "efficientnet-b4": (1.4, 1.8, 0.4),
    "efficientnet-b5": (1.6, 2.2, 0.4),
    "efficientnet-b6": (1.8, 2.6, 0.5),
    "efficientnet-b7": (2.0, 3.1, 0.5),
    "efficientnet-cifar": (0.5, 1.0, 0.0),
    "efficientnet-lite0": (1.0, 1.0, 0.2),
    "efficientnet-lite1": (1.0, 1.1, 0.2),
    "efficientnet-lite2": (1.1, 1.2, 0.3),
    "efficientnet-lite3": (1.2, 1.4, 0.3),
    "efficientnet-lite4": (1.4, 1.8, 0.3),
}
"""Width and depth as multiples of B0's, and dropout."""

EFFICIENTNET_STAGES = (
    (3, 1, 1, 16),
    (3, 2, 2, 24),
    (5, 2, 2, 40),
    (3, 2, 3, 80),
    (5, 1, 3, 112),
    (5, 2, 4, 192),
    (3, 1, 1, 320),
)
"""B0's stages: side of the window, stride, units, channels."""

MOBILENET2_STAGES = (
    (3, 1, 1, 16),
    (3, 2, 2, 24),
    (3, 2, 3, 32),
    (3, 2, 4, 64),
    (3, 1, 3, 96),
    (3, 2, 3, 160),
    (3, 1, 1, 320),
)
"""MobileNet v2's stages: side of the window, stride, units, channels."""

MOBILENET3_STAGES: dict[str, tuple[tuple[int, int, tuple[int, ...], int, bool, Activation], ...]] = {
    "mobilenet-v3-small": (
        (3, 2, (16,), 16, True, "relu"),
        (3, 2, (72, 88), 24, False, "relu"),
        (5, 2, (96, 240, 240), 40, True, "hardswish"),
        (5, 1, (120, 144), 48, True, "hardswish"),
        (5, 2, (288, 576, 576), 96, True, "hardswish"),
    ),
    "mobilenet-v3-large": (
        (3, 1, (16,), 16, False, "relu"),
        (3, 2, (64, 72), 24, False, "relu"),
        (5, 2, (72, 120, 120), 40, True, "relu"),
        (3, 2, (240, 200, 184, 184), 80, False, "hardswish"),
        (3, 1, (480, 672), 112, True, "hardswish"),
        (5, 2, (672, 960, 960), 160, True, "hardswish"),
    ),
}
"""Side of the window, stride, channels inside each unit, channels outside, squeeze-and-excite, activation."""

MOBILENET3_DENSE = {"mobilenet-v3-small": 1024, "mobilenet-v3-large": 1280}
"""Features of the dense layer before the last."""


@dataclass(frozen=True)
class Squeeze:
    """Squeeze-and-excite: how narrow it gets, and how."""

    channels: int
    activation: Activation
    gate: Literal["sigmoid", "hardsigmoid"]


@dataclass(frozen=True)
class UnitShape:
    """An inverted residual unit: a window of `size` pixels a side over `inside` channels in groups."""

    inputs: int
    inside: int
    outputs: int
    size: int
    stride: int
    groups: int
    activation: Activation
    squeeze: Squeeze | None = None

    @property
    def identity(self) -> bool:
        """Whether the shortcut fits as it is; other units have none."""
        return self.stride == 1 and self.inputs == self.outputs


@dataclass(frozen=True)
class NetworkShape:
    """A network of such units between a first convolution and a last."""

    stem: int
    units: dict[str, UnitShape]
    top: int
    activation: Activation
    dropout: float
    stem_stride: int = 2
    survival: float = 1.0
    same: bool = False
    """Whether strided convolutions are padded as TensorFlow does."""


def round_channels(channels: float, divisor: int = 8) -> int:
    """The nearest multiple of the divisor, or the one above where that would take off more than a tenth."""
    nearest = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * channels else nearest


def shape(model: Mobile) -> NetworkShape:
    """The shape of a network."""
    match model:
        case EfficientNet():
            return _efficientnet(model)
        case MobileNetV2():
            return _mobilenet2(model)
        case MobileNetV3():
            return _mobilenet3(model)


def norm_numbers(model: Mobile) -> tuple[float, float]:
    """Epsilon and momentum of the norms that a network was published with."""
    match model:
        case EfficientNet(name="efficientnet-b5" | "efficientnet-b6" | "efficientnet-b7") | MobileNetV3():
            return 1e-3, 0.01
        case EfficientNet() if is_lite(model):
            return 1e-3, 0.1
        case EfficientNet() | MobileNetV2():
            return 1e-5, 0.1


def _efficientnet(model: EfficientNet) -> NetworkShape:
    width, depth, dropout = EFFICIENTNETS[model.name]
    width, depth = model.width or width, model.depth or depth
    cifar, lite = model.name == "efficientnet-cifar", is_lite(model)
    activation: Activation = model.activation or ("relu6" if lite else "silu")
    squeezed = model.squeeze_excite if model.squeeze_excite is not None else 0.0 if lite else 0.25
    units: dict[str, UnitShape] = {}
    stem = inputs = round_channels(32 * (1 if lite else width), model.divisor)
    for stage, (size, stride, count, channels) in enumerate(EFFICIENTNET_STAGES, 1):
        outputs = round_channels(channels * width, model.divisor)
        fixed = lite and stage in (1, len(EFFICIENTNET_STAGES))
        for unit in range(1, math.ceil(count * (1 if fixed else depth)) + 1):
            inside = inputs * (model.expand_ratio if stage > 1 else 1)
            strides = stride if unit == 1 and not (cifar and stage == 2) else 1
            squeeze = Squeeze(max(1, int(inputs * squeezed)), activation, "sigmoid") if squeezed else None
            units[f"stage{stage}/unit{unit}"] = UnitShape(
                inputs, inside, outputs, size, strides, _groups(inside, model.group_dim), activation, squeeze
            )
            inputs = outputs
    return NetworkShape(
        stem, units, round_channels(model.top_width * (1 if lite else width), model.divisor), activation,
        dropout if model.dropout is None else model.dropout, 1 if cifar else 2, model.survival,
        model.padding == "same" or (model.padding is None and lite),
    )  # fmt: skip


def is_lite(model: EfficientNet) -> bool:
    """Whether it is one of the Lite networks, whose stem and last layers are the same at any width and depth."""
    return model.name.startswith("efficientnet-lite")


def _mobilenet2(model: MobileNetV2) -> NetworkShape:
    units: dict[str, UnitShape] = {}
    stem = inputs = round_channels(32 * model.width)
    for stage, (size, stride, count, channels) in enumerate(MOBILENET2_STAGES, 1):
        outputs = round_channels(channels * model.width)
        for unit in range(1, count + 1):
            inside = inputs * (6 if stage > 1 else 1)
            strides = stride if unit == 1 else 1
            units[f"stage{stage}/unit{unit}"] = UnitShape(inputs, inside, outputs, size, strides, inside, "relu6")
            inputs = outputs
    return NetworkShape(stem, units, round_channels(1280 * max(1.0, model.width)), "relu6", model.dropout)


def _mobilenet3(model: MobileNetV3) -> NetworkShape:
    units: dict[str, UnitShape] = {}
    stem = inputs = round_channels(16 * model.width)
    for stage, (size, stride, insides, channels, squeezes, activation) in enumerate(MOBILENET3_STAGES[model.name], 1):
        outputs = round_channels(channels * model.width)
        for unit, wide in enumerate(insides, 1):
            inside = round_channels(wide * model.width)
            squeeze = Squeeze(round_channels(inside // 4), "relu", "hardsigmoid") if squeezes else None
            units[f"stage{stage}/unit{unit}"] = UnitShape(
                inputs, inside, outputs, size, stride if unit == 1 else 1, inside, activation, squeeze
            )
            inputs = outputs
    return NetworkShape(stem, units, 6 * inputs, "hardswish", model.dropout)


def _groups(channels: int, group_dim: int) -> int:
    """How many groups of about this many channels there are: 24 channels are one group where 16 are asked for, as in
    the published B4."""
    groups = max(1, channels // group_dim)
    if channels % groups:
        raise PlanError(
            f"model.group_dim: {channels} channels cannot be split into {groups} groups of about {group_dim}; "
            f"write model.divisor={group_dim}, which makes all channels multiples of it, or another group_dim"
        )
    return groups
