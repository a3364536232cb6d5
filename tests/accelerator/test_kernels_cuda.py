"""Fused batch norm on CUDA: no further from float64 than autocast, the same bits every time, for shapes of any kind."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from norm_cases import ACTIVATIONS, factors_of, make_norms, numbers, passes, row_passes
from paceline.model.batch import Batch
from paceline.model.kernels import rows
from paceline.settings.model import Activation

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RAGGED = [
    *[(1, 128, 64, 16), (8, 4, 49, 24), (2, 3, 7, 5), (1, 5, 75, 130), (2, 16, 196, 256), (1, 3, 1, 7), (3, 2, 25, 64)],
    *[(1, 64, 49, 2048), (256, 2, 16, 40), (1, 32, 3136, 144), (1, 16, 12544, 64)],
]
"""Groups, images, rows of an image and channels."""


SLOPES: list[Activation] = ["relu", "silu"]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with a standard deviation of 2, a little off zero, drawn on the device."""
    return (torch.randn(shape, device="cuda") * 2 + 0.4).to(dtype)


def distance(ours: Tensor, exact: Tensor) -> float:
    """How far one tensor is from another, in units of that one's length."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shortcut", [False, True])
def test_the_fused_form_is_no_further_from_float64_than_autocast(
    dtype: torch.dtype, activation: Activation | None, shortcut: bool
) -> None:
    fused, plain = (norm.cuda() for norm in make_norms(64, activation))
    x = numbers("x", 24, 64, 28, 28).to(memory_format=torch.channels_last).cuda().to(dtype)
    exact = passes(plain, x.double(), 3, shortcut, shortcut, dtype)
    for norm in (fused, plain):
        norm.float()
    ours, theirs = (passes(norm, x, 3, shortcut, shortcut, dtype) for norm in (fused, plain))
    names = ["y", "statistics", "dx", "dweight", "dbias", "dshortcut"]
    for name, one, other, value in zip(names, ours, theirs, exact, strict=False):
        print(f"{name}: fused {distance(one, value):.2e}, autocast {distance(other, value):.2e}")
        assert one.dtype == other.dtype
        assert distance(one, value) <= 1.1 * distance(other, value) + 2e-6, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_have_the_twin_s_numbers_for_ragged_shapes(dtype: torch.dtype) -> None:
    from paceline.model.kernels import rows_triton

    limit = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    for (groups, images, size, channels), activation in product(RAGGED, SLOPES):
        shape = groups, images * size, channels
        dy, x, beside = (drawn(*shape, dtype=dtype) for _ in range(3))
        mask = factors_of(groups * images).cuda().float().view(groups, images)
        for shortcut, factors in ((None, None), (beside, mask)):
            ours = row_passes(rows_triton, dy, x, activation, shortcut, factors)
            wide = None if shortcut is None else shortcut.double()
            exact = row_passes(rows, dy.double(), x.double(), activation, wide, factors)
            for name, value in ours.items():
                scale = float(exact[name].abs().max())
                error = float((value.double() - exact[name].double()).norm() / value.numel() ** 0.5)
                assert error <= limit * scale + 1e-6, (shape, activation, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_of_30_standard_deviations_costs_no_digits(dtype: torch.dtype) -> None:
    from paceline.model.kernels import rows_triton

    x = (drawn(2, 200_704, 64, dtype=torch.float32) + 60).to(dtype)
    mean, var = rows_triton.moments(x)
    expected, exact = x.double().var(1, correction=0), x.double().mean(1)
    assert float((mean / exact - 1).abs().max()) < 1e-6
    assert float((var / expected - 1).abs().max()) < 1e-4
    dy, ones = drawn(*x.shape, dtype=dtype), torch.ones(2, 64, device="cuda")
    sums, moments, _ = rows_triton.gradient_sums(dy, x, ones, ones, None)
    centered = (dy.double() * (x.double() - exact[:, None])).sum(1)
    assert distance(moments - exact * sums, centered) < 1e-4


@pytest.mark.parametrize("shortcut", [False, True])
def test_two_calls_have_equal_bits(shortcut: bool) -> None:
    norm = make_norms(96, "relu")[0].cuda().float()
    x = numbers("x", 32, 96, 28, 28).to(memory_format=torch.channels_last).cuda().bfloat16()
    first, second = (passes(norm, x, 2, shortcut, shortcut) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_a_graph_holds_both_passes() -> None:
    norm = make_norms(64, "silu")[0].cuda().float()
    x = numbers("x", 8, 64, 14, 14).to(memory_format=torch.channels_last).cuda().bfloat16().requires_grad_()
    batch = Batch(torch.zeros(2, 128, device="cuda"))

    def both() -> list[Tensor]:
        y = norm(x, batch, x)
        return [y, *torch.autograd.grad(y, [x, norm.weight, norm.bias], torch.ones_like(y))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [value.detach().clone() for value in both()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


def test_more_than_two_billion_numbers_are_all_seen() -> None:
    from paceline.model.kernels import rows_triton

    count, channels = 8_400_000, 256
    x = torch.zeros((1, count, channels), dtype=torch.bfloat16, device="cuda")
    x[:, -1] = 1024
    mean, var = rows_triton.moments(x)
    assert torch.allclose(mean, torch.full_like(mean, 1024 / count), rtol=1e-12)
    assert torch.allclose(var, torch.full_like(var, 1024**2 / count * (1 - 1 / count)), rtol=1e-12)
    ones = torch.ones((1, channels), device="cuda")
    y = rows_triton.scale_shift(x, ones, ones, "relu")
    assert float(y[0, -1].min()) == float(y[0, -1].max()) == 1024  # 1025 in bfloat16
    assert float(y[0, -2].max()) == 1
    sums, moments, _ = rows_triton.gradient_sums(y, x, ones, ones, None)
    assert float(sums.min()) == float(sums.max()) == count - 1 + 1024
    assert float(moments.min()) == float(moments.max()) == 1024**2
    dx = rows_triton.norm_gradient(y, x, ones, ones, ones, ones, ones)
    assert float(dx[0, -1].min()) == 2048
    assert float(dx[0, -2].max()) == 2
