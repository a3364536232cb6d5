"""The Inception family: GoogLeNet, Inception v3 and v4, Inception-ResNet v2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Chain, Layer
from paceline.model.dropout import Dropout
from paceline.model.inception_tables import modules
from paceline.model.layers import ConvNorm, Head, MakeNorm, MaxPool, MeanPool, Windows, conv
from paceline.settings.model import GoogLeNet, InceptionResNetV2, InceptionV3, InceptionV4

_EPSILON = 0.001
"""What the norms of these networks were published with."""

_POOLS: dict[str, Callable[[], nn.Module]] = {
    "mean": partial(MeanPool, 3),
    "inner-mean": partial(MeanPool, 3, inner=True),
    "max": partial(MaxPool, 3, 1, 1),
    "max/2": partial(MaxPool, 3, 2),
}


class Branches(Layer, nn.Sequential):
    """Chains side by side over the same picture, in the notation of `inception_tables`; what they give, one behind the
    other, are the next picture's channels."""

    def __init__(self, text: str, inputs: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.outputs = 0
        for words in text.split("|"):
            chain, width = Chain(), inputs
            for word in words.split():
                link, width = _link(word, width, make_norm)
                chain.append(link)
            self.append(chain)
            self.outputs += width

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:  # type: ignore[override]
        pictures: list[Tensor] = [chain(x, batch) for chain in self]
        return torch.cat(pictures, dim=1) if len(pictures) > 1 else pictures[0]


class Auxiliary(Layer):
    """A head in mid-network: in training it adds its scores to the picture, in evaluation it does nothing."""

    def __init__(self, features: Chain, width: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.dense = nn.Linear(width, classes)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor | tuple[Tensor, Tensor]:
        return x if batch is None else (x, self.dense(self.features(x, batch)))


def _link(word: str, inputs: int, make_norm: MakeNorm) -> tuple[nn.Module, int]:
    """What a word of the text stands for, and how many channels it gives."""
    if word in _POOLS:
        return _POOLS[word](), inputs
    window, channels = word.split(":")
    if "+" in window:
        pair = Branches("|".join(f"{each}:{channels}" for each in window.split("+")), inputs, make_norm)
        return pair, pair.outputs
    size, _, stride = window.partition("/")
    rows, columns = (int(length) for length in size.removesuffix("v").split("x"))
    padding = 0 if stride or size.endswith("v") else (rows // 2, columns // 2)
    width = int(channels)
    convolution = nn.Conv2d(inputs, width, (rows, columns), int(stride or 1), padding, bias=False)
    return ConvNorm(convolution, make_norm), width


GOOGLENET_POOLS = {"stem/conv1": 3, "stem/conv3": 3, "inception3b": 3, "inception4e": 2}
"""The window of the max-pool that ends a block of GoogLeNet."""


def googlenet_blocks(model: GoogLeNet, channels: int, classes: int, make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of GoogLeNet; a max-pool belongs to the block before it."""
    make_norm = make_norm.published(_EPSILON)
    blocks: dict[str, nn.Module] = {
        "stem/conv1": ConvNorm(conv(channels, 64, 7, 2), make_norm),
        "stem/conv2": ConvNorm(conv(64, 64, 1), make_norm),
        "stem/conv3": ConvNorm(conv(64, 192, 3), make_norm),
    }
    width = 192
    for name, text in modules(model):
        if name.startswith("aux"):
            blocks[name] = _googlenet_auxiliary(width, classes, model.auxiliary_dropout, make_norm)
        elif text:
            blocks[name] = module = Branches(text, width, make_norm)
            width = module.outputs
    blocks |= {name: Chain(blocks[name], MaxPool(size, 2, ceil=True)) for name, size in GOOGLENET_POOLS.items()}
    return blocks | {"head": Head(width, classes, model.dropout)}


def _googlenet_auxiliary(inputs: int, classes: int, dropout: float, make_norm: MakeNorm) -> Auxiliary:
    squeeze = ConvNorm(conv(inputs, 128, 1), make_norm)
    hidden = nn.Linear(4 * 4 * 128, 1024)
    features = Chain(Windows(4), squeeze, nn.Flatten(), hidden, nn.ReLU(), Dropout(dropout, 1024))
    return Auxiliary(features, 1024, classes)


def inception_blocks(
    model: InceptionV3 | InceptionV4, channels: int, classes: int, make_norm: MakeNorm
) -> dict[str, nn.Module]:
    """The named blocks of Inception v3, which may have an auxiliary head, or v4, which has none."""
    make_norm = make_norm.published(_EPSILON)
    blocks: dict[str, nn.Module] = {}
    width = channels
    for name, text in modules(model):
        if text:
            blocks[name] = module = Branches(text, width, make_norm)
            width = module.outputs
        else:
            blocks[name] = _inception3_auxiliary(width, classes, make_norm)
    return blocks | {"head": Head(width, classes, model.dropout)}


def _inception3_auxiliary(inputs: int, classes: int, make_norm: MakeNorm) -> Auxiliary:
    squeeze = ConvNorm(nn.Conv2d(inputs, 128, 1, bias=False), make_norm)
    widen = ConvNorm(nn.Conv2d(128, 768, 5, bias=False), make_norm)
    mean = nn.AdaptiveAvgPool2d(1)
    return Auxiliary(Chain(nn.AvgPool2d(5, 3), squeeze, widen, mean, nn.Flatten()), 768, classes)


class ScaledResidual(Layer):
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
    make_norm = make_norm.published(_EPSILON)
    scales = dict(zip(("stage1", "stage2", "stage3"), model.residual_scale, strict=True))
    final = f"stage3/unit{model.units[2]}"
    blocks: dict[str, nn.Module] = {}
    for name, text in modules(model):
        stage = name.partition("/")[0]
        if stage in scales:
            scale = 1.0 if name == final else scales[stage]
            blocks[name] = ScaledResidual(channels, text, scale, name == final, make_norm)
        else:
            blocks[name] = module = Branches(text, channels, make_norm)
            channels = module.outputs
    return blocks | {"head": Head(channels, classes, model.dropout)}
