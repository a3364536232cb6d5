"""The micro-batch that a training pass works for, and the modules that are told which one it is."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Batch(NamedTuple):
    """What layers know of the micro-batch that they work for; None in its place means evaluation."""

    statistics: Tensor
    """[norm groups, columns]: where batch norms write the mean and variance of each norm group."""
    dropout: tuple[Tensor, ...] = ()
    """What each dropout layer multiplies the features of each image by."""
    depth: tuple[Tensor, ...] = ()
    """What each layer of stochastic depth multiplies the residual branch of each image by."""
    slots: tuple[tuple[tuple[Tensor, Tensor], ...], ...] = ()
    """Views of `statistics` made ahead, for each batch norm and norm group the place of its mean and variance."""
    moments: dict[int, tuple[Tensor, Tensor]] | None = None
    """Where the pass may be computed again: mean and variance of each norm that replicas share, by its index, from the
    first time on."""
    outputs: dict[nn.Module, Tensor] | None = None
    """The same: what pieces of the network gave the first time, by their last block, where that is fused so that it
    takes it."""


class Layer(nn.Module):
    """A module that takes the micro-batch as its second argument: layer(x, batch)."""


class Chain(Layer, nn.Sequential):
    """Layers and torch's own modules, one after another."""

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:  # type: ignore[override]
        for module in self:
            x = module(x, batch) if isinstance(module, Layer) else module(x)
        return x
