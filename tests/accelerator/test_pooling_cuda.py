"""Pools, and a bias with a ReLU, by one kernel for each pass on CUDA: torch's maxima, and float64's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.kernels.pooling import fused_bias_relu, fused_max_pool, mean_pool
from paceline.model.kernels.windows import Window

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}
"""How far numbers of a type may be from float64's."""
SHAPES = [(64, 35), (288, 17), (80, 24)]
"""Channels and sides of pictures."""


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers drawn on the device, as pictures in channels-last order."""
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def assert_near(y: Tensor, exact: Tensor, inputs: tuple[Tensor, ...], limit: float) -> None:
    """Outputs and gradients are near those in float64."""
    dy = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, inputs, dy))
    expected = (exact, *torch.autograd.grad(exact, inputs, dy.double()))
    for one, other in zip(found, expected, strict=True):
        ours, theirs = one.detach().double(), other.detach().double()
        assert float((ours - theirs).norm() / theirs.norm()) < limit


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    "window", [Window(2, 2), Window(3, 2), Window(3, 2, 1), Window(3, 1, 1), Window(3, 2, 0, True)]
)
def test_max_pools_have_torch_s_maxima_and_gradients(window: Window, dtype: torch.dtype) -> None:
    for channels, side in SHAPES:
        x = drawn(4, channels, side, side + 1, dtype=dtype)
        y, exact = fused_max_pool(x, window), F.max_pool2d(x.double(), *window[:3], ceil_mode=window.ceil)
        assert torch.equal(y.double(), exact)
        assert_near(y, exact, (x,), LIMITS[dtype])


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_mean_pools_have_float64_s_means_and_gradients(inner: bool, fused: bool, dtype: torch.dtype) -> None:
    for channels, side in SHAPES:
        x = drawn(4, channels, side, side, dtype=dtype)
        # In the order of torch's default: in channels-last order, torch's own gradients of padded means are wrong.
        exact = F.avg_pool2d(x.double().contiguous(), 3, 1, 1, count_include_pad=not inner)
        assert_near(mean_pool(x, 3, inner, fused), exact, (x,), LIMITS.get(dtype, 1e-12))


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_bias_and_relu_have_float64_s_numbers(dtype: torch.dtype) -> None:
    x, bias = drawn(8, 192, 27, 27, dtype=dtype), torch.randn(192, device="cuda", requires_grad=True)
    exact = F.relu(x.double() + bias.double()[:, None, None])
    assert_near(fused_bias_relu(x, bias), exact, (x, bias), LIMITS[dtype])


def test_two_calls_have_equal_bits() -> None:
    x = drawn(16, 96, 28, 28, dtype=torch.bfloat16)
    found = []
    for _ in range(2):
        y = mean_pool(fused_max_pool(x, Window(3, 2)), 3, True, True)
        found.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    assert torch.equal(*found)
