"""GoogLeNet (Inception v1) with a norm after each convolution."""

from __future__ import annotations

from torch import nn

from paceline.model.batch import Chain
from paceline.model.branches import EPSILON, Auxiliary, Branches
from paceline.model.dropout import Dropout
from paceline.model.inception_tables import modules
from paceline.model.layers import ConvNorm, Head, MakeNorm, Windows, conv
from paceline.settings.model import GoogLeNet

POOLS = {"stem/conv1": 3, "stem/conv3": 3, "inception3b": 3, "inception4e": 2}
"""The window of the max-pool that ends a block."""


def googlenet_blocks(model: GoogLeNet, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of GoogLeNet; a max-pool belongs to the block before it."""
    make_norm = make_norm.published(EPSILON)
    blocks: dict[str, nn.Module] = {
        "stem/conv1": ConvNorm(conv(channels, 64, 7, 2), make_norm),
        "stem/conv2": ConvNorm(conv(64, 64, 1), make_norm),
        "stem/conv3": ConvNorm(conv(64, 192, 3), make_norm),
    }
    width = 192
    for name, text in modules(model):
        if name.startswith("aux"):
            blocks[name] = _auxiliary(width, classes, model.auxiliary_dropout, make_norm)
        elif text:
            blocks[name] = module = Branches(text, width, make_norm)
            width = module.outputs
    blocks |= {name: Chain(blocks[name], nn.MaxPool2d(size, 2, ceil_mode=True)) for name, size in POOLS.items()}
    return blocks | {"head": Head(width, classes, model.dropout)}


def _auxiliary(inputs: int, classes: int, dropout: float, make_norm: MakeNorm) -> Auxiliary:
    squeeze = ConvNorm(conv(inputs, 128, 1), make_norm)
    hidden = nn.Linear(4 * 4 * 128, 1024)
    features = Chain(Windows(4), squeeze, nn.Flatten(), hidden, nn.ReLU(), Dropout(dropout, 1024))
    return Auxiliary(features, 1024, classes)
