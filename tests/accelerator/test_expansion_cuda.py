"""Widening 1x1 convolutions fused with norm and activation, on CUDA: near float64, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.batch import Batch
from paceline.model.kernels.expansion import expansion_pays, fused_expansion
from paceline.model.layers import ConvNorm, MakeNorm, conv
from paceline.model.norm import BatchNormAct, Statistics
from paceline.settings.model import Activation
from paceline.settings.recipe import BatchNorm

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def passes(layer: ConvNorm, x: Tensor, dy: Tensor, groups: int, fused: bool) -> list[Tensor]:
    """Output, statistics and all gradients of a pass."""
    norm, x = layer.norm, x.detach().requires_grad_()
    assert isinstance(norm, BatchNormAct)
    batch = Batch(Statistics(layer, 1, groups).pass_rows(0))
    with torch.autocast("cuda", x.dtype, enabled=x.dtype == torch.bfloat16):
        y = fused_expansion(layer.conv, norm, x, batch) if fused else layer(x, batch)
    return [y.detach(), batch.statistics, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


@pytest.mark.parametrize("activation", ["silu", "relu6"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "images", "side", "groups"),
    [(24, 144, 8, 95, 1), (16, 96, 8, 112, 2), (40, 240, 12, 28, 3), (56, 336, 8, 48, 1), (112, 672, 16, 24, 1)],
)
def test_a_fused_pass_is_no_further_from_float64_than_autocast(
    inputs: int, outputs: int, images: int, side: int, groups: int, activation: Activation
) -> None:
    layer = ConvNorm(conv(inputs, outputs, 1), MakeNorm(BatchNorm(name="batch"), 1e-3), activation).cuda()
    # Channels whose means are up to three deviations away from zero, as behind a norm and a shortcut.
    means = torch.linspace(-3, 3, inputs, device="cuda")[:, None, None]
    x = (torch.randn(images, inputs, side, side, device="cuda") + means).bfloat16()
    dy = torch.randn(images, outputs, side, side, device="cuda").bfloat16()
    x, dy = (each.contiguous(memory_format=torch.channels_last) for each in (x, dy))
    assert expansion_pays(x, groups)
    fused, again, plain = (passes(layer, x, dy, groups, form) for form in (True, True, False))
    assert all(map(torch.equal, fused, again))
    exact = passes(layer.double(), x.double(), dy.double(), groups, False)
    for one, other, value in zip(fused, plain, exact, strict=True):
        ours, theirs = (float((each.double() - value).norm() / value.norm()) for each in (one, other))
        print(f"{tuple(value.shape)}: fused {ours:.2e}, autocast {theirs:.2e}")
        assert ours <= 1.2 * theirs + 1e-3
