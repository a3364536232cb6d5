"""3x3 convolutions of few channels in float32 on CUDA: as near to float64 as torch's, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.kernels.convolution import NarrowConv
from paceline.model.layers import conv

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def passes(layer: NarrowConv, x: Tensor, dy: Tensor, fused: bool) -> list[Tensor]:
    """Output and gradients."""
    layer.fused, x = fused, x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, layer.weight], dy)]


@pytest.mark.parametrize("side", [32, 7])
@pytest.mark.parametrize(
    ("inputs", "outputs", "stride"), [(16, 16, 1), (16, 32, 2), (32, 32, 1), (64, 32, 1), (32, 64, 2), (64, 64, 1)]
)
def test_a_fused_pass_is_as_near_to_float64_as_torch_s(
    inputs: int, outputs: int, stride: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = conv(inputs, outputs, 3, stride)
    assert isinstance(layer, NarrowConv)
    layer.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    half = -(-side // stride)
    x, dy = torch.randn(100, inputs, side, side, device="cuda"), torch.randn(100, outputs, half, half, device="cuda")
    x, dy = (each.contiguous(memory_format=torch.channels_last) for each in (x, dy))
    fused, again, plain = (passes(layer, x, dy, form) for form in (True, True, False))
    assert all(map(torch.equal, fused, again))
    exact = passes(layer.double(), x.double(), dy.double(), False)
    for one, other, value in zip(fused, plain, exact, strict=True):
        ours, theirs = (float((each.double() - value).norm() / value.norm()) for each in (one, other))
        print(f"{tuple(value.shape)}: fused {ours:.2e}, torch {theirs:.2e}")
        assert ours <= 1.5 * theirs + 2e-8


def test_pictures_in_the_other_order_are_convolved_too() -> None:
    layer = conv(16, 32, 3).cuda()
    assert isinstance(layer, NarrowConv)
    x = torch.randn(8, 16, 9, 9, device="cuda")
    exact = layer.double()(x.double()).detach()
    layer.float().fused = True
    assert float((layer(x).detach() - exact).norm() / exact.norm()) < 1e-6
