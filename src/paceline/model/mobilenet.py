"""MobileNets v2 and v3."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model import mobile_tables
from paceline.model.batch import Batch, Layer
from paceline.model.inverted import trunk
from paceline.model.layers import Head, MakeNorm
from paceline.model.mobile_tables import MOBILENET3_DENSE, round_channels
from paceline.settings.model import MobileNetV2, MobileNetV3


class Dense(Layer):
    """Mean over the picture, a dense layer and hard swish; gives a picture of one pixel, which any head can take."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, features)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:  # noqa: ARG002 - a block takes it
        return F.hardswish(self.dense(x.mean((2, 3))))[:, :, None, None]


def mobilenet2_blocks(model: MobileNetV2, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a MobileNet v2."""
    shape = mobile_tables.shape(model)
    return trunk(shape, channels, make_norm) | {"head": Head(shape.top, classes, shape.dropout)}


def mobilenet3_blocks(model: MobileNetV3, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a MobileNet v3."""
    shape = mobile_tables.shape(model)
    features = round_channels(MOBILENET3_DENSE[model.name] * model.width)
    blocks = trunk(shape, channels, make_norm.published(epsilon=1e-3, momentum=0.01))
    return blocks | {"dense1": Dense(shape.top, features), "head": Head(features, classes, shape.dropout)}
