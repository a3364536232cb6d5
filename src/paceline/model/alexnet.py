"""AlexNet in one tower, and the blocks that VGG shares with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Layer
from paceline.model.dropout import Dropout
from paceline.model.kernels.pooling import fused_bias_relu
from paceline.model.layers import MakeNorm, MaxPool, Windows
from paceline.settings.model import AlexNet

CONVOLUTIONS = ((64, 11, 4, 2, 3), (192, 5, 1, 2, 3), (384, 3, 1, 1, 0), (256, 3, 1, 1, 0), (256, 3, 1, 1, 3))
"""Outputs, window, stride, padding and the window of the max-pool (0: none) of each."""


class Convolution(Layer):
    """A convolution with a bias, a norm if there is one, a ReLU, and a max-pool of stride 2 unless `pool` is 0."""

    fused: bool = False
    """Whether bias and ReLU are one pass, where no norm stands between them."""

    def __init__(self, convolution: nn.Conv2d, pool: int, make_norm: MakeNorm | None = None) -> None:
        super().__init__()
        self.conv = convolution
        self.norm = make_norm(convolution.out_channels) if make_norm else None
        self.pool = MaxPool(pool, 2) if pool else None

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        y = self.norm(self.conv(x), batch) if self.norm else self._rectified(x)
        return self.pool(y) if self.pool else y

    def _rectified(self, x: Tensor) -> Tensor:
        layer = self.conv
        if self.fused and layer.bias is not None and not torch.compiler.is_compiling():
            return fused_bias_relu(layer._conv_forward(x, layer.weight, None), layer.bias)
        return F.relu_(layer(x))


class Dense(Layer):
    """Dropout and a dense layer."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout, inputs)
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        y: Tensor = self.dense(self.dropout(x, batch))
        return y


class HiddenDense(Dense):
    """Dropout, a dense layer and a ReLU."""

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        return F.relu_(super().forward(x, batch))


class PixelDense(HiddenDense):
    """Dropout, a dense layer and a ReLU over all pixels of a picture, which is first averaged to a fixed side."""

    def __init__(self, channels: int, side: int, outputs: int, dropout: float) -> None:
        super().__init__(channels * side**2, outputs, dropout)
        self.windows = Windows(side)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        return super().forward(self.windows(x).flatten(1), batch)


def dense_blocks(channels: int, side: int, classes: int, dropouts: tuple[float, float, float]) -> dict[str, nn.Module]:
    """Three dense layers over side x side pixels, and what is dropped before each."""
    first, second, last = dropouts
    return {
        "dense1": PixelDense(channels, side, 4096, first),
        "dense2": HiddenDense(4096, 4096, second),
        "head": Dense(4096, classes, last),
    }


def alexnet_blocks(model: AlexNet, channels: int, classes: int, _make_norm: MakeNorm) -> dict[str, nn.Module]:
    """The named blocks of the network, which has no norms."""
    blocks: dict[str, nn.Module] = {}
    for index, (outputs, window, stride, padding, pool) in enumerate(CONVOLUTIONS, 1):
        blocks[f"conv{index}"] = Convolution(nn.Conv2d(channels, outputs, window, stride, padding), pool)
        channels = outputs
    return blocks | dense_blocks(channels, 6, classes, (model.dropout, model.dropout, 0))
