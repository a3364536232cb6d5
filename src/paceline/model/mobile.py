"""EfficientNets and MobileNets: networks of inverted residual units, wide inside and narrow outside."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model import mobile_tables
from paceline.model.batch import Batch, Chain, Layer
from paceline.model.dropout import StochasticDepth
from paceline.model.kernels.gate import Excite
from paceline.model.kernels.pooling import picture_mean
from paceline.model.kernels.squeeze import folded_squeeze, fused_squeeze
from paceline.model.layers import ConvNorm, Head, MakeNorm, conv, conv_norm
from paceline.model.mobile_tables import MOBILENET3_DENSE, NetworkShape, Squeeze, UnitShape, round_channels
from paceline.model.norm import ACTIVATIONS, BatchNormAct
from paceline.settings.model import EfficientNet, MobileNetV2, MobileNetV3

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": F.sigmoid, "hardsigmoid": F.hardsigmoid}


class SqueezeExcite(nn.Module):
    """Scales each channel by a factor that two small layers compute from the means of all channels."""

    def __init__(self, channels: int, shape: Squeeze) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, shape.channels, 1)
        self.excite = nn.Conv2d(shape.channels, channels, 1)
        self.activate, self.gate = ACTIVATIONS[shape.activation], GATES[shape.gate]
        self.shape = shape

    def factors(self, means: Tensor) -> Tensor:
        """The factors [images, channels, 1, 1] by the means of all channels, in the same shape."""
        return self.gate(self.excite(self.activate(self.squeeze(means))))

    def layers(self) -> Excite:
        """The two layers as matrices."""
        first, second, shape = self.squeeze, self.excite, self.shape
        assert first.bias is not None
        assert second.bias is not None
        weights = first.weight.flatten(1), first.bias, second.weight.flatten(1), second.bias
        return Excite(*weights, shape.activation, shape.gate)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors(x.mean((2, 3), keepdim=True))


class InvertedUnit(Layer):
    """A 1x1 convolution that widens, a grouped one, squeeze-and-excite, a 1x1 that narrows; a shortcut where it fits.

    A unit that is no wider inside does not widen. `drop` is the fraction of images for which the branch is left out.
    With `same` the grouped convolution is padded as TensorFlow does.
    """

    fused: bool = False
    """Whether squeeze-and-excite is computed together with the batch norm before it."""

    def __init__(self, shape: UnitShape, drop: float, make_norm: MakeNorm, *, same: bool = False) -> None:
        super().__init__()
        inside, activation = shape.inside, shape.activation
        self.identity = shape.identity
        layers: list[nn.Module] = []
        if inside != shape.inputs:
            layers.append(ConvNorm(conv(shape.inputs, inside, 1), make_norm, activation))
        window = conv(inside, inside, shape.size, shape.stride, shape.groups, same=same)
        layers.append(ConvNorm(window, make_norm, activation))
        if shape.squeeze:
            layers.append(SqueezeExcite(inside, shape.squeeze))
        self.wide = Chain(*layers)
        self.conv = conv(inside, shape.outputs, 1)
        self.norm = make_norm(shape.outputs, None, "branch" if self.identity else "plain")
        self.depth = StochasticDepth(drop) if self.identity and drop else None

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        mask = self.depth.mask(batch) if self.depth else None
        return conv_norm(self.conv, self.norm, self._widened(x, batch), batch, x if self.identity else None, mask)

    def _widened(self, x: Tensor, batch: Batch | None) -> Tensor:
        if not self.fused:
            return self.wide(x, batch)  # type: ignore[no-any-return]
        *before, window, excite = self.wide.children()
        assert isinstance(window, ConvNorm)
        assert isinstance(window.norm, BatchNormAct)
        assert isinstance(excite, SqueezeExcite)
        folded = window.norm.folded
        if batch is None and folded is None:
            return self.wide(x, batch)  # type: ignore[no-any-return]
        for layer in before:
            x = layer(x, batch)
        x = window.conv(x)
        if batch is not None:
            return fused_squeeze(window.norm, excite, x, batch)
        assert folded is not None
        return folded_squeeze(folded, excite.layers(), x)

    def can_fuse_squeeze(self) -> bool:
        """Whether squeeze-and-excite stands behind a batch norm."""
        window, excite = [None, *self.wide.children()][-2:]
        behind_norm = isinstance(window, ConvNorm) and isinstance(window.norm, BatchNormAct)
        return behind_norm and isinstance(excite, SqueezeExcite)


def trunk(shape: NetworkShape, channels: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks up to the last convolution; later units are left out more often, the first never."""
    first = conv(channels, shape.stem, 3, shape.stem_stride, same=shape.same)
    blocks: dict[str, nn.Module] = {"stem": ConvNorm(first, make_norm, shape.activation)}
    for index, (name, unit) in enumerate(shape.units.items()):
        drop = (1 - shape.survival) * index / len(shape.units)
        blocks[name] = InvertedUnit(unit, drop, make_norm, same=shape.same)
    last = conv(unit.outputs, shape.top, 1)
    return blocks | {"top": ConvNorm(last, make_norm, shape.activation)}


def inverted_blocks(
    model: EfficientNet | MobileNetV2, channels: int, classes: int, make_norm: MakeNorm
) -> dict[str, nn.Module]:
    """The named blocks of an EfficientNet or a MobileNet v2."""
    shape = mobile_tables.shape(model)
    make_norm = make_norm.published(*mobile_tables.norm_numbers(model))
    return trunk(shape, channels, make_norm) | {"head": Head(shape.top, classes, shape.dropout)}


class PooledDense(Layer):
    """Mean over the picture, a dense layer and hard swish; gives a picture of one pixel, which any head takes."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, features)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:  # noqa: ARG002 - a block takes it
        return F.hardswish(self.dense(picture_mean(x)))[:, :, None, None]


def mobilenet3_blocks(model: MobileNetV3, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of a MobileNet v3."""
    shape = mobile_tables.shape(model)
    features = round_channels(MOBILENET3_DENSE[model.name] * model.width)
    blocks = trunk(shape, channels, make_norm.published(*mobile_tables.norm_numbers(model)))
    return blocks | {"dense1": PooledDense(shape.top, features), "head": Head(features, classes, shape.dropout)}
