"""Pools and a bias with a ReLU as one kernel each: torch's own numbers, in both passes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from interpreted import interpret_kernels
from paceline.model.kernels import windows
from paceline.model.kernels.pooling import _PictureMean, fused_bias_relu, fused_max_pool, mean_pool
from paceline.model.kernels.windows import Window

WINDOWS = [
    Window(2, 2), Window(3, 2), Window(3, 2, 1), Window(3, 1, 1), Window(3, 2, ceil=True), Window(2, 2, ceil=True),
]  # fmt: skip
SIDES = [(7, 9), (8, 6)]


def pictures(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of few values, so that many are equal."""
    x = torch.randint(-4, 5, shape).to(dtype).contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def pooled(x: Tensor, window: Window) -> Tensor:
    size, stride, padding, ceil = window
    return F.max_pool2d(x, size, stride, padding, ceil_mode=ceil)


def assert_same(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Both functions have equal outputs and gradients to rounding."""
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, dy)[0] for each in (y, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_fused_max_pool_is_torch_s(window: Window, side: tuple[int, int]) -> None:
    assert_same(lambda x: fused_max_pool(x, window), lambda x: pooled(x, window), pictures(2, 5, *side))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("size", [3, 5])
def test_a_fused_mean_pool_is_torch_s(size: int, inner: bool) -> None:
    assert_same(
        lambda x: mean_pool(x, size, inner, True),
        lambda x: F.avg_pool2d(x, size, 1, size // 2, count_include_pad=not inner),
        pictures(2, 5, 7, 9),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_of_pictures_has_torch_s_bits_and_a_gradient_without_memory(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, 7, 5, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(3, 8, dtype=dtype)
    ours, theirs = _PictureMean.apply(x), x.mean((2, 3))  # type: ignore[no-untyped-call]
    assert torch.equal(ours, theirs)
    (d_ours,), (d_theirs,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    assert torch.equal(d_ours, d_theirs)
    assert d_ours.untyped_storage().nbytes() == dy.untyped_storage().nbytes()


def test_a_fused_bias_and_relu_are_torch_s() -> None:
    x, bias = pictures(3, 5, 4, 6), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert_same(lambda x: fused_bias_relu(x, bias), lambda x: F.relu(x + bias[:, None, None]), x)
    dy = torch.randn(3, 5, 4, 6, dtype=torch.float64)
    found = torch.autograd.grad(fused_bias_relu(x, bias), bias, dy)[0]
    expected = torch.autograd.grad(F.relu(x + bias[:, None, None]), bias, dy)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", range(4, 12))
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_are_as_many_as_torch_has(window: Window, length: int) -> None:
    assert window.count(length) == pooled(torch.zeros(1, 1, length, length), window).shape[2]


@pytest.fixture
def ours() -> ModuleType:
    """The kernels, interpreted."""
    interpret_kernels()
    from paceline.model.kernels import windows_triton

    return windows_triton


@pytest.mark.parametrize("channels", [5, 32, 40])
@pytest.mark.parametrize("window", WINDOWS)
def test_interpreted_kernels_have_the_maxima_and_gradients_of_their_twins(
    ours: ModuleType, window: Window, channels: int
) -> None:
    x = pictures(2, channels, 7, 9, dtype=torch.float32).detach()
    y, pixel = windows.max_windows(x, window)
    own, place = ours.max_windows(x, window)
    assert torch.equal(own, y)
    dy = torch.randn_like(y)
    expected = windows.max_windows_gradient(dy, pixel, x.shape, window)
    torch.testing.assert_close(ours.max_windows_gradient(dy, place, x.shape, window), expected)


def test_an_interpreted_maximum_with_nan_is_nan(ours: ModuleType) -> None:
    x = torch.zeros(1, 32, 4, 4).contiguous(memory_format=torch.channels_last)
    x[0, :, 1, 0] = torch.nan
    y, place = ours.max_windows(x, Window(2, 2))
    assert y[0, 0, 0, 0].isnan()
    assert place[0, 0, 0, 0] == 2
    assert y.isnan().sum() == 32


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("channels", [5, 32])
def test_interpreted_kernels_have_the_means_and_gradients_of_their_twins(
    ours: ModuleType, channels: int, inner: bool
) -> None:
    x = torch.randn(2, channels, 5, 6).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours.mean_windows(x, 3, inner), windows.mean_windows(x, 3, inner))
    found, expected = (each.mean_windows_gradient(x, 3, inner) for each in (ours, windows))
    torch.testing.assert_close(found, expected)
