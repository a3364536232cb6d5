"""Residual networks, plain and with grouped convolutions: the ImageNet widths, and those for 32-pixel images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Layer
from paceline.model.kernels.bottleneck import fused_bottleneck, pays
from paceline.model.kernels.stem import fits_stem, folded_stem, fused_stem
from paceline.model.layers import ConvNorm, Head, MakeNorm, MaxPool, conv, conv_norm
from paceline.model.norm import BatchNormAct
from paceline.model.tables import BASIC, DEPTHS, cifar_depths
from paceline.settings.model import CifarResNet, CifarResNeXt, ResNet, ResNeXt

IMAGENET_WIDTHS = (64, 128, 256, 512)
CIFAR_WIDTHS = (16, 32, 64)


@dataclass(frozen=True)
class ResidualShape:
    """What a unit is like apart from its width."""

    bottleneck: bool
    stride_first: bool
    shortcut: Literal["pad", "projection"]
    groups: int = 1
    """Groups of a bottleneck's 3x3 convolution."""
    width_ratio: float = 1.0
    """How much wider than its width a bottleneck's 3x3 convolution is."""
    blur: bool = False
    """Whether a picture is blurred before it is halved."""


class ResidualUnit(Layer):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, beside a shortcut."""

    fused: bool = False
    """Whether a training pass takes the fused form of a bottleneck, where norm groups have rows enough."""

    def __init__(
        self, inputs: int, width: int, stride: int, shape: ResidualShape, make_norm: MakeNorm, project: bool = False
    ) -> None:
        super().__init__()
        outputs = 4 * width if shape.bottleneck else width
        changes = stride != 1 or inputs != outputs
        self.stride, self.extra = stride, outputs - inputs if changes and shape.shortcut == "pad" else 0
        projects = project or (changes and shape.shortcut == "projection")
        role = "projected-branch" if projects else "branch"
        if shape.bottleneck:
            inner = int(width * shape.width_ratio)
            self.conv1 = conv(inputs, inner, 1, stride if shape.stride_first else 1, blur=shape.blur)
            self.norm1 = make_norm(inner)
            self.conv2 = conv(inner, inner, 3, 1 if shape.stride_first else stride, shape.groups, blur=shape.blur)
            self.norm2 = make_norm(inner)
            self.conv3 = conv(inner, outputs, 1)
            self.norm3 = make_norm(outputs, role=role)
        else:
            self.conv1 = conv(inputs, width, 3, stride, blur=shape.blur)
            self.norm1 = make_norm(width)
            self.conv2 = conv(width, width, 3)
            self.norm2 = make_norm(width, role=role)
        self.bottleneck, self.projects = shape.bottleneck, projects
        if projects:
            self.projection = conv(inputs, outputs, 1, stride, blur=shape.blur)
            self.projection_norm = make_norm(outputs, None, "projection")

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        if self.fused and batch is not None and pays(self, len(x) // len(batch.statistics), x.shape[2]):
            return fused_bottleneck(self, x, batch)
        shortcut = x
        if self.projects:
            shortcut = conv_norm(self.projection, self.projection_norm, x, batch)
        elif self.extra:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        y = conv_norm(self.conv1, self.norm1, x, batch)
        if self.bottleneck:
            return conv_norm(self.conv3, self.norm3, conv_norm(self.conv2, self.norm2, y, batch), batch, shortcut)
        return conv_norm(self.conv2, self.norm2, y, batch, shortcut)


class Stem(ConvNorm):
    """The first convolution, with a max-pool where images are large."""

    fused: torch.dtype | None = None
    """The type in which the fused form is computed, if it takes that."""

    def __init__(self, channels: int, outputs: int, large: bool, make_norm: MakeNorm) -> None:
        super().__init__(conv(channels, outputs, 7, 2) if large else conv(channels, outputs, 3), make_norm)
        self.pool = MaxPool(3, 2, 1) if large else None

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        if self.fused is not None and fits_stem(x):
            if batch is not None:
                return fused_stem(self, x, batch, self.fused)
            if isinstance(self.norm, BatchNormAct) and self.norm.folded is not None:
                return folded_stem(self.conv.weight, self.norm.folded, x, self.fused)
        y = super().forward(x, batch)
        return self.pool(y) if self.pool else y


def resnet_blocks(model: ResNet, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of an ImageNet-width network."""
    shape = ResidualShape(model.name not in BASIC, model.version == "v1", "projection", blur=model.blur)
    stem = Stem(channels, IMAGENET_WIDTHS[0], model.stem == "7x7", make_norm)
    return _blocks(stem, IMAGENET_WIDTHS, DEPTHS[model.name], shape, classes, make_norm, model.first_projection)


def cifar_resnet_blocks(model: CifarResNet, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a narrow network."""
    bottleneck = model.name.endswith("-bottleneck")
    shortcut: Literal["pad", "projection"] = "projection" if bottleneck else "pad"
    shape = ResidualShape(bottleneck, False, shortcut if model.shortcut == "auto" else model.shortcut)
    stem = Stem(channels, CIFAR_WIDTHS[0], False, make_norm)
    return _blocks(stem, CIFAR_WIDTHS, cifar_depths(model.name), shape, classes, make_norm)


def resnext_blocks(model: ResNeXt, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of an ImageNet-width network of grouped convolutions."""
    shape = _grouped(model, IMAGENET_WIDTHS[0], stride_first=model.version == "v1")
    stem = Stem(channels, IMAGENET_WIDTHS[0], model.stem == "7x7", make_norm)
    return _blocks(stem, IMAGENET_WIDTHS, DEPTHS[model.name], shape, classes, make_norm)


def cifar_resnext_blocks(model: CifarResNeXt, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a network of grouped convolutions for 32-pixel images."""
    widths = IMAGENET_WIDTHS[:3] if model.wide else CIFAR_WIDTHS
    stem = Stem(channels, widths[0], False, make_norm)
    return _blocks(stem, widths, cifar_depths(model.name), _grouped(model, widths[0]), classes, make_norm)


def _grouped(model: ResNeXt | CifarResNeXt, first: int, stride_first: bool = False) -> ResidualShape:
    """Bottlenecks whose 3x3 convolution has `cardinality` groups of `group_width` channels in the first stage."""
    return ResidualShape(
        True, stride_first, "projection", model.cardinality, model.cardinality * model.group_width / first
    )


def _blocks(
    stem: Stem, widths: tuple[int, ...], depths: tuple[int, ...], shape: ResidualShape, classes: int,
    make_norm: MakeNorm, project: bool = False,
) -> dict[str, nn.Module]:  # fmt: skip
    """The stem, units named stage1/unit1, stage1/unit2, ..., and the head; stages after the first halve the picture."""
    blocks: dict[str, nn.Module] = {"stem": stem}
    inputs = widths[0]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        for unit in range(1, depth + 1):
            stride = 2 if unit == 1 and stage > 1 else 1
            first = project and stage == 1 and unit == 1
            blocks[f"stage{stage}/unit{unit}"] = ResidualUnit(inputs, width, stride, shape, make_norm, first)
            inputs = width * 4 if shape.bottleneck else width
    return blocks | {"head": Head(inputs, classes)}
