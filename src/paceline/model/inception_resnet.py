"""Inception-ResNet v2: Inception modules whose joined chains are the residual branch of a unit."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Layer
from paceline.model.branches import EPSILON, Branches
from paceline.model.inception_tables import modules
from paceline.model.layers import Head, MakeNorm
from paceline.settings.model import InceptionResNetV2


class Residual(Layer):
    """A module, brought back to the picture's channels, scaled and added to the picture; the last has no activation."""

    def __init__(self, channels: int, text: str, scale: float, last: bool, make_norm: MakeNorm) -> None:
        super().__init__()
        self.scale, self.last = scale, last
        self.mixed = Branches(text, channels, make_norm)
        self.conv = nn.Conv2d(self.mixed.outputs, channels, 1)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        # The branch ends in a convolution, not in a norm, so the sum is no norm_act.
        y = x.add(self.conv(self.mixed(x, batch)), alpha=self.scale)
        return y if self.last else F.relu_(y)


def inception_resnet_blocks(
    model: InceptionResNetV2, channels: int, classes: int, make_norm: MakeNorm
) -> dict[str, nn.Module]:
    """The named blocks of Inception-ResNet v2; its last unit is added unscaled."""
    make_norm = make_norm.published(EPSILON)
    scales = dict(zip(("stage1", "stage2", "stage3"), model.residual_scale, strict=True))
    final = f"stage3/unit{model.units[2]}"
    blocks: dict[str, nn.Module] = {}
    for name, text in modules(model):
        stage = name.partition("/")[0]
        if stage in scales:
            scale = 1.0 if name == final else scales[stage]
            blocks[name] = Residual(channels, text, scale, name == final, make_norm)
        else:
            blocks[name] = module = Branches(text, channels, make_norm)
            channels = module.outputs
    return blocks | {"head": Head(channels, classes, model.dropout)}
