"""A network during an evaluation: what follows from weights that do not change is computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.model.kernels.convolution import PLAIN_CONVS
from paceline.model.layers import BlurredConv, SameConv
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct

CAST = (*PLAIN_CONVS, nn.Linear, BlurredConv, SameConv)
"""Layers that do nothing with their weights but multiply by them; those of other packages may, and keep theirs."""


class FoldedNetwork:
    """The forward pass of a network in evaluation, by its weights and running statistics of the moment it is made.

    Each batch norm is a factor and a term for each channel, and the weights of convolutions and dense layers are of the
    type that they compute in. The network itself stays as it is, but for the duration of a pass.
    """

    @torch.no_grad()
    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        self._network = network
        self._norms = [(norm, norm.fold()) for norm in network.modules() if isinstance(norm, BatchNormAct)]
        self._weights = {
            f"{name}.weight": layer.weight.to(dtype) for name, layer in network.named_modules() if type(layer) in CAST
        }

    def __call__(self, images: Tensor, batch: None = None) -> Any:
        """What the network gives in evaluation."""
        for norm, folded in self._norms:
            norm.folded = folded
        try:
            return functional_call(self._network, self._weights, images, {"batch": batch}, tie_weights=False)
        finally:
            for norm, _ in self._norms:
                norm.folded = None
