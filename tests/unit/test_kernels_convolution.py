"""3x3 convolutions of few channels, interpreted: torch's own numbers and gradients."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from bottleneck_cases import distance
from interpreted import interpret_kernels


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels, interpreted, with few programs, which are slow."""
    interpret_kernels()
    from paceline.model.kernels import convolution_triton

    monkeypatch.setattr(convolution_triton, "MULTIPROCESSORS", 3)
    return convolution_triton


@pytest.mark.parametrize("side", [(7, 9), (8, 6)])
@pytest.mark.parametrize(("channels", "outputs", "stride"), [(16, 16, 1), (16, 32, 2), (64, 32, 1), (32, 64, 2)])
def test_a_convolution_and_its_gradients_are_torch_s(
    ours: ModuleType, channels: int, outputs: int, stride: int, side: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, channels, *side).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.conv2d(*exact, None, stride, 1)
    dy = torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
    expected = [y.detach(), *torch.autograd.grad(y, exact, dy.double())]
    got = [
        ours.convolved(x, weight, stride),
        ours.picture_gradient(dy, weight, x.shape, stride),
        ours.weight_gradient(x, dy, stride),
    ]
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert distance(one, other) < 1e-6
