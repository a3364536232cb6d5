"""What the Inception networks share: parallel branches from a line of text, and auxiliary heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from paceline.model.batch import Batch, Chain, Layer
from paceline.model.layers import ConvNorm, MakeNorm

EPSILON = 0.001
"""What the norms of these networks were published with."""

_POOLS: dict[str, Callable[[], nn.Module]] = {
    "mean": partial(nn.AvgPool2d, 3, 1, 1),
    "inner-mean": partial(nn.AvgPool2d, 3, 1, 1, count_include_pad=False),
    "max": partial(nn.MaxPool2d, 3, 1, 1),
    "max/2": partial(nn.MaxPool2d, 3, 2),
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
    rows, columns = (int(part) for part in size.removesuffix("v").split("x"))
    padding = 0 if stride or size.endswith("v") else (rows // 2, columns // 2)
    width = int(channels)
    convolution = nn.Conv2d(inputs, width, (rows, columns), int(stride or 1), padding, bias=False)
    return ConvNorm(convolution, make_norm), width
