"""Dropout and stochastic depth, with masks keyed to each image's position in the endless list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline import keyed
from paceline.model.batch import Batch, Layer

Masks = tuple[Tensor, ...]


class Dropout(Layer):
    """Zeroes a fraction of the features of each image, and scales up the others."""

    index: int
    """Which of a batch's dropout masks is this layer's; `DropoutMasks` sets it."""

    def __init__(self, rate: float, features: int) -> None:
        super().__init__()
        self.rate, self.features = rate, features
        """Features are counted later in networks of other packages, and until then nothing is dropped."""

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        if batch is None or self.rate == 0 or self.features == 0:
            return x
        return x * batch.dropout[self.index].to(x.dtype).view(x.shape)


class StochasticDepth(Layer):
    """Leaves out a residual branch for a fraction of the images, and scales it up for the others."""

    index: int
    """Which of a batch's depth masks is this layer's; `DropoutMasks` sets it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def mask(self, batch: Batch | None) -> Tensor | None:
        """What to multiply the branch of each image by, if anything."""
        return None if batch is None or self.rate == 0 else batch.depth[self.index]

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        mask = self.mask(batch)
        return x if mask is None else x * mask.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


class DropoutMasks:
    """Draws the masks of all dropout layers of a network at once: a few kernels, not a few for each layer.

    A mask depends on the seed, the image's position and the layer's index among those of its kind.
    """

    def __init__(self, network: nn.Module, seed: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        dropouts = [m for m in network.modules() if isinstance(m, Dropout) and m.rate]
        depths = [m for m in network.modules() if isinstance(m, StochasticDepth) and m.rate]
        for index, dropout in enumerate(dropouts):
            dropout.index = index
        for index, depth in enumerate(depths):
            depth.index = index
        self._features = [m.features for m in dropouts]
        self._dropout_rates, self._depth_rates = [m.rate for m in dropouts], [m.rate for m in depths]
        self._dropout_key, self._depth_key = keyed.key(seed, "dropout"), keyed.key(seed, "stochastic depth")

    def __call__(self, positions: Tensor) -> tuple[Masks, Masks]:
        """The dropout and the depth masks for the images at these positions of the endless list."""
        dropout: Masks = ()
        depth: Masks = ()
        if self._dropout_rates:
            index = torch.arange(-(-sum(self._features) // 4), device=positions.device)
            words = torch.stack(keyed.words(self._dropout_key, positions[:, None], index), dim=2).flatten(1)
            pieces = words[:, : sum(self._features)].split(self._features, 1)
            dropout = tuple(map(self._mask, pieces, self._dropout_rates))
        if self._depth_rates:
            index = torch.arange(len(self._depth_rates), device=positions.device)
            words = keyed.words(self._depth_key, positions[:, None], index)[0]
            depth = tuple(map(self._mask, words.unbind(1), self._depth_rates))
        return dropout, depth

    def _mask(self, words: Tensor, rate: float) -> Tensor:
        """0 for a fraction `rate` of the words, and for the others what makes up for it."""
        return (words >= round(rate * 2**32)).to(self._dtype) / (1 - rate)
