"""Inception v3: modules whose larger windows are taken apart into rows and columns."""

from __future__ import annotations

from torch import nn

from paceline.model.batch import Chain
from paceline.model.branches import EPSILON, Auxiliary, Branches
from paceline.model.inception_tables import modules
from paceline.model.layers import ConvNorm, Head, MakeNorm
from paceline.settings.model import InceptionV3


def inception3_blocks(model: InceptionV3, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of Inception v3."""
    make_norm = make_norm.published(EPSILON)
    blocks: dict[str, nn.Module] = {}
    width = channels
    for name, text in modules(model):
        if text:
            blocks[name] = module = Branches(text, width, make_norm)
            width = module.outputs
        else:
            blocks[name] = _auxiliary(width, classes, make_norm)
    return blocks | {"head": Head(width, classes, model.dropout)}


def _auxiliary(inputs: int, classes: int, make_norm: MakeNorm) -> Auxiliary:
    squeeze = ConvNorm(nn.Conv2d(inputs, 128, 1, bias=False), make_norm)
    widen = ConvNorm(nn.Conv2d(128, 768, 5, bias=False), make_norm)
    mean = nn.AdaptiveAvgPool2d(1)
    return Auxiliary(Chain(nn.AvgPool2d(5, 3), squeeze, widen, mean, nn.Flatten()), 768, classes)
