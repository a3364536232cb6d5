"""What a network does by chance in training, from numbers keyed to each image's position in the endless list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline import keyed


class Dropout(nn.Module):
    """Zeroes a share of the features of each image, and scales up the others."""

    kept: Tensor

    def __init__(self, rate: float, features: int) -> None:
        super().__init__()
        self.rate, self.features = rate, features
        """Features are counted later in networks of other packages, and until then nothing is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0 or self.features == 0:
            return x
        return x * self.kept.to(x.dtype).view(x.shape)


class StochasticDepth(nn.Module):
    """Leaves out a residual branch for a share of the images, and scales it up for the others."""

    kept: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        return x * self.kept.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


class Chances:
    """All that is left to chance in a network, drawn at once for a micro-batch: a few kernels, not a few a layer.

    A number depends on the seed, the image's position and the layer's place among those of its kind.
    """

    def __init__(self, network: nn.Module, seed: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._dropouts = [m for m in network.modules() if isinstance(m, Dropout) and m.rate]
        self._depths = [m for m in network.modules() if isinstance(m, StochasticDepth) and m.rate]
        self._features = [m.features for m in self._dropouts]
        self._keys = keyed.key(seed, "dropout"), keyed.key(seed, "stochastic depth")

    def draw(self, positions: Tensor) -> None:
        """Decide for the images at these positions what every layer keeps."""
        places = positions[:, None]
        if self._dropouts:
            index = torch.arange(-(-sum(self._features) // 4), device=positions.device)
            words = torch.stack(keyed.words(self._keys[0], places, index), dim=2).flatten(1)
            for part, word in zip(
                self._dropouts, words[:, : sum(self._features)].split(self._features, 1), strict=True
            ):
                part.kept = self._kept(word, part.rate)
        if self._depths:
            index = torch.arange(len(self._depths), device=positions.device)
            words = keyed.words(self._keys[1], places, index)[0]
            for depth, word in zip(self._depths, words.unbind(1), strict=True):
                depth.kept = self._kept(word, depth.rate)

    def _kept(self, words: Tensor, rate: float) -> Tensor:
        """0 for a share `rate` of the words, and for the others what makes up for it."""
        return (words >= round(rate * 2**32)).to(self._dtype) / (1 - rate)
