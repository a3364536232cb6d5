"""Layers that several families share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Layer
from paceline.model.dropout import Dropout
from paceline.model.kernels.convolution import FEW, NarrowConv
from paceline.model.kernels.expansion import can_expand, expansion_pays, fused_expansion
from paceline.model.kernels.folded import folded_product, is_product
from paceline.model.kernels.pooling import LARGEST, fused_max_pool, mean_pool, picture_mean
from paceline.model.kernels.windows import Window
from paceline.model.norm import BatchNormAct, GroupNormAct, NormAct, ProxyNormAct, Role
from paceline.settings.model import Activation
from paceline.settings.recipe import BatchNorm, GroupNorm, NoNorm


@dataclass(frozen=True)
class MakeNorm:
    """make_norm(channels, activation, role): the normalization a recipe asks for."""

    settings: BatchNorm | GroupNorm | NoNorm
    epsilon: float = 1e-5
    momentum: float = 0.1

    def published(self, epsilon: float, momentum: float = 0.1) -> MakeNorm:
        """The norms of a network published with these numbers, which hold where the recipe names none."""
        return replace(self, epsilon=epsilon, momentum=momentum)

    def __call__(self, channels: int, activation: Activation | None = "relu", role: Role = "plain") -> NormAct:
        match self.settings:
            case BatchNorm(momentum=momentum, epsilon=epsilon):
                return BatchNormAct(channels, momentum or self.momentum, epsilon or self.epsilon, activation, role)
            case GroupNorm(groups=groups, epsilon=epsilon, proxy=False):
                return GroupNormAct(channels, groups, epsilon or self.epsilon, activation, role)
            case GroupNorm(groups=groups, epsilon=epsilon, proxy_epsilon=proxy):
                return ProxyNormAct(channels, groups, epsilon or self.epsilon, proxy, activation, role)
            case NoNorm():
                return NormAct(channels, activation, role)


class BlurredConv(nn.Conv2d):
    """A convolution of a picture blurred by weights of 1, 2, 1 in both directions, so that a stride skips nothing."""

    def forward(self, x: Tensor) -> Tensor:
        # Means over two neighbors, twice, are these weights; zeros lie around the picture. They are put there by hand
        # on CUDA, where torch up to 2.13 has wrong gradients for padded means in channels-last order.
        means = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2, 1) if x.is_cuda else F.avg_pool2d(x, 2, 1, padding=1)
        return super().forward(F.avg_pool2d(means, 2, 1))


class SameConv(nn.Conv2d):
    """A strided convolution padded as TensorFlow's 'SAME': just enough zeros, the odd one after the last pixel."""

    def forward(self, x: Tensor) -> Tensor:
        size, stride = self.kernel_size[0], self.stride[0]
        zeros = [max(0, (-(-side // stride) - 1) * stride + size - side) for side in (x.shape[3], x.shape[2])]
        around = [part for count in zeros for part in (count // 2, count - count // 2)]
        return F.conv2d(F.pad(x, around), self.weight, None, stride, groups=self.groups)


def conv(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, *, blur: bool = False, same: bool = False
) -> nn.Conv2d:
    """A convolution without bias that keeps the side, or halves it with stride 2, blurred before that if asked.

    With `same` the zeros around what a strided one sees are TensorFlow's.
    """
    narrow = size == 3 and groups == 1 and inputs in FEW and outputs in FEW
    plain = NarrowConv if narrow else nn.Conv2d
    kind = plain if stride == 1 else BlurredConv if blur else SameConv if same else plain
    return kind(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)


def conv_norm(
    layer: nn.Conv2d, norm: NormAct, x: Tensor, batch: Batch | None,
    shortcut: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A norm, its shortcut and its activation behind a convolution; both are one in evaluation where that pays."""
    if batch is None and isinstance(norm, BatchNormAct) and norm.folded is not None and is_product(layer):
        return folded_product(layer, norm, norm.folded, x, shortcut)
    y: Tensor = norm(layer(x), batch, shortcut, mask)
    return y


class ConvNorm(Layer):
    """A convolution without bias, a norm and an activation."""

    expands: bool = False
    """Whether a training pass takes the fused form of a convolution that widens, where norm groups have rows enough."""

    def __init__(self, convolution: nn.Conv2d, make_norm: MakeNorm, activation: Activation | None = "relu") -> None:
        super().__init__()
        self.conv = convolution
        self.norm = make_norm(convolution.out_channels, activation)

    def can_expand(self) -> bool:
        """Whether convolution and norm have that fused form."""
        return can_expand(self.conv, self.norm)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        if self.expands and batch is not None and expansion_pays(x, len(batch.statistics)):
            assert isinstance(self.norm, BatchNormAct)
            return fused_expansion(self.conv, self.norm, x, batch)
        return conv_norm(self.conv, self.norm, x, batch)


class MaxPool(nn.Module):
    """The largest pixel of each window."""

    fused: bool = False
    """Whether it is computed by kernels of our own."""

    def __init__(self, size: int, stride: int, padding: int = 0, *, ceil: bool = False) -> None:
        super().__init__()
        self.window = Window(size, stride, padding, ceil)

    def forward(self, x: Tensor) -> Tensor:
        size, stride, padding, ceil = self.window
        if self.fused and size <= LARGEST and not torch.compiler.is_compiling():
            return fused_max_pool(x, self.window)
        return F.max_pool2d(x, size, stride, padding, ceil_mode=ceil)


class MeanPool(nn.Module):
    """The mean over the square around each pixel; zeros around the picture count unless it is `inner`."""

    fused: bool = False
    """Whether it is computed by kernels of our own."""

    def __init__(self, size: int, *, inner: bool = False) -> None:
        super().__init__()
        self.size, self.inner = size, inner

    def forward(self, x: Tensor) -> Tensor:
        # On CUDA, torch up to 2.13 gives such means in channels-last order the gradients of other pixels.
        if (self.fused or x.is_cuda) and not torch.compiler.is_compiling():
            return mean_pool(x, self.size, self.inner, self.fused)
        return F.avg_pool2d(x, self.size, 1, self.size // 2, count_include_pad=not self.inner)


class Windows(nn.Module):
    """Means over side x side windows that together cover the picture, whatever its own side.

    This is adaptive pooling, but torch's own has no backward pass on CUDA that always adds in the same order.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        for axis in (2, 3):
            length = x.shape[axis]
            if length != self.side:
                edges = [(i * length // self.side, -(-(i + 1) * length // self.side)) for i in range(self.side)]
                x = torch.stack([x.narrow(axis, start, end - start).mean(axis) for start, end in edges], axis)
        return x


class Head(Layer):
    """Mean over the picture, then one score for each class."""

    def __init__(self, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout, channels)
        self.dense = nn.Linear(channels, classes)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        scores: Tensor = self.dense(self.dropout(picture_mean(x), batch))
        return scores
