"""Inverted residual units, wide inside and narrow outside: what EfficientNets and MobileNets are made of."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Chain, Layer
from paceline.model.dropout import StochasticDepth
from paceline.model.layers import ConvNorm, MakeNorm, conv
from paceline.model.mobile_tables import NetworkShape, Squeeze, UnitShape
from paceline.model.norm import ACTIVATIONS

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": F.sigmoid, "hardsigmoid": F.hardsigmoid}


class SqueezeExcite(nn.Module):
    """Scales each channel by what a small network makes of the means of all channels."""

    def __init__(self, channels: int, shape: Squeeze) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, shape.channels, 1)
        self.excite = nn.Conv2d(shape.channels, channels, 1)
        self.activate, self.gate = ACTIVATIONS[shape.activation], GATES[shape.gate]

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.excite(self.activate(self.squeeze(means))))


class InvertedUnit(Layer):
    """Widen by a 1x1 convolution, look around in groups, squeeze and excite, narrow; beside a shortcut where one fits.

    A unit that is no wider inside does not widen. `drop` is the fraction of images for which the branch is left out.
    """

    def __init__(self, shape: UnitShape, drop: float, make_norm: MakeNorm) -> None:
        super().__init__()
        inside, activation = shape.inside, shape.activation
        self.identity = shape.identity
        layers: list[nn.Module] = []
        if inside != shape.inputs:
            layers.append(ConvNorm(conv(shape.inputs, inside, 1), make_norm, activation))
        layers.append(ConvNorm(conv(inside, inside, shape.size, shape.stride, shape.groups), make_norm, activation))
        if shape.squeeze:
            layers.append(SqueezeExcite(inside, shape.squeeze))
        self.wide = Chain(*layers)
        self.conv = conv(inside, shape.outputs, 1)
        self.norm = make_norm(shape.outputs, None, "branch" if self.identity else "plain")
        self.depth = StochasticDepth(drop) if self.identity and drop else None

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        mask = self.depth.mask(batch) if self.depth else None
        y: Tensor = self.norm(self.conv(self.wide(x, batch)), batch, x if self.identity else None, mask)
        return y


def trunk(shape: NetworkShape, channels: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks up to the last convolution; later units are left out more often, the first never."""
    first = conv(channels, shape.stem, 3, shape.stem_stride)
    blocks: dict[str, nn.Module] = {"stem": ConvNorm(first, make_norm, shape.activation)}
    for number, (name, unit) in enumerate(shape.units.items()):
        blocks[name] = InvertedUnit(unit, (1 - shape.survival) * number / len(shape.units), make_norm)
    last = conv(unit.outputs, shape.top, 1)
    return blocks | {"top": ConvNorm(last, make_norm, shape.activation)}
