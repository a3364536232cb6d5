"""VGG: five stages of 3x3 convolutions, each ending in a max-pool, with and without norms."""

from __future__ import annotations

from torch import nn

from paceline.model.alexnet import Convolution, dense_blocks
from paceline.model.layers import Head, MakeNorm
from paceline.model.tables import DEPTHS
from paceline.settings.model import Vgg

WIDTHS = (64, 128, 256, 512, 512)


def vgg_blocks(model: Vgg, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of the network; convolutions have a bias even before a norm, as published."""
    name, _, suffix = model.name.partition("-")
    norm = make_norm if suffix == "bn" else None
    blocks: dict[str, nn.Module] = {}
    for stage, (width, depth) in enumerate(zip(WIDTHS, DEPTHS[name], strict=True), 1):
        for index in range(1, depth + 1):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            blocks[f"stage{stage}/conv{index}"] = Convolution(convolution, 2 if index == depth else 0, norm)
            channels = width
    if model.head == "mean":
        return blocks | {"head": Head(channels, classes, model.dropout)}
    return blocks | dense_blocks(channels, 7, classes, (0, model.dropout, model.dropout))
