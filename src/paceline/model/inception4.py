"""Inception v4: every block is one line of its table."""

from __future__ import annotations

from torch import nn

from paceline.model.branches import EPSILON, Branches
from paceline.model.inception_tables import modules
from paceline.model.layers import Head, MakeNorm
from paceline.settings.model import InceptionV4


def inception4_blocks(model: InceptionV4, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of Inception v4."""
    make_norm = make_norm.published(EPSILON)
    blocks: dict[str, nn.Module] = {}
    for name, text in modules(model):
        blocks[name] = module = Branches(text, channels, make_norm)
        channels = module.outputs
    return blocks | {"head": Head(channels, classes, model.dropout)}
