"""Residual networks with grouped convolutions: the ImageNet widths, and those for 32-pixel images."""

from __future__ import annotations

from torch import nn

from paceline.model.layers import Head, MakeNorm
from paceline.model.resnet import Shape, Stem, stages
from paceline.model.tables import DEPTHS, cifar_depths
from paceline.settings.model import CifarResNeXt, ResNeXt


def resnext_blocks(model: ResNeXt, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of an ImageNet-width network."""
    widths = (64, 128, 256, 512)
    shape = _shape(model, widths[0], stride_first=model.version == "v1")
    blocks: dict[str, nn.Module] = {"stem": Stem(channels, 64, model.stem == "7x7", make_norm)}
    return blocks | stages(widths, DEPTHS[model.name], shape, make_norm) | {"head": Head(4 * widths[-1], classes)}


def cifar_resnext_blocks(model: CifarResNeXt, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a network for 32-pixel images."""
    widths = (64, 128, 256) if model.wide else (16, 32, 64)
    shape = _shape(model, widths[0])
    blocks: dict[str, nn.Module] = {"stem": Stem(channels, widths[0], False, make_norm)}
    return blocks | stages(widths, cifar_depths(model.name), shape, make_norm) | {"head": Head(4 * widths[-1], classes)}


def _shape(model: ResNeXt | CifarResNeXt, first: int, stride_first: bool = False) -> Shape:
    """Bottlenecks whose 3x3 convolution has `cardinality` groups of `group_width` channels in the first stage."""
    return Shape(True, stride_first, "projection", model.cardinality, model.cardinality * model.group_width / first)
