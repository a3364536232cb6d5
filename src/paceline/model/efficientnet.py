"""EfficientNets: B0 to B7, and the half-width one for 32-pixel images."""

from __future__ import annotations

from torch import nn

from paceline.model import mobile_tables
from paceline.model.inverted import trunk
from paceline.model.layers import Head, MakeNorm
from paceline.settings.model import EfficientNet


def efficientnet_blocks(model: EfficientNet, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of an EfficientNet."""
    shape = mobile_tables.shape(model)
    if model.name in ("efficientnet-b5", "efficientnet-b6", "efficientnet-b7"):
        make_norm = make_norm.published(epsilon=1e-3, momentum=0.01)
    return trunk(shape, channels, make_norm) | {"head": Head(shape.top, classes, shape.dropout)}
