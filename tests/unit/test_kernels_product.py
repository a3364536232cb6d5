"""The Triton kernel of a 1x1 convolution and its norm, interpreted, has the numbers of its twin."""

from __future__ import annotations

import pytest
import torch

from interpreted import interpret_kernels
from paceline.model.kernels import product
from paceline.model.kernels.tiles import Tile
from paceline.settings.model import Activation

TILE = Tile(16, 32, 16, 4, 2)


@pytest.mark.parametrize(("groups", "rows", "inputs", "outputs"), [(1, 40, 24, 40), (2, 32, 16, 64), (3, 25, 24, 8)])
@pytest.mark.parametrize(("activation", "shortcut"), [("silu", False), ("relu", True), (None, True)])
def test_an_interpreted_product_is_that_of_its_twin(
    groups: int, rows: int, inputs: int, outputs: int, activation: Activation | None, shortcut: bool
) -> None:
    interpret_kernels()
    from paceline.model.kernels import product_triton

    a, weight = torch.randn(groups, rows, inputs), torch.randn(outputs, inputs)
    scale, shift = torch.randn(2, groups, outputs)
    beside = torch.randn(groups, rows, outputs) if shortcut else None
    ours = product_triton.product_act(a, weight, scale, shift, activation, beside, TILE)
    twin = product.product_act(a, weight, scale, shift, activation, beside)
    torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)
