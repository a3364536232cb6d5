"""Fused batch norm: in float64 the plain path's numbers; its Triton kernels, interpreted, have those of the twin."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from interpreted import interpret_kernels
from norm_cases import ACTIVATIONS, factors_of, make_norms, numbers, passes, row_passes
from paceline.model.batch import Batch
from paceline.model.kernels import rows
from paceline.model.kernels.norm import as_rows
from paceline.model.norm import BatchNormAct
from paceline.settings.model import Activation
from replicas_made import Circle, in_threads

CHANNELS = 5


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shortcut", "masked"), [*product([False, True], repeat=2)])
def test_the_fused_form_has_the_plain_path_s_numbers(
    groups: int, activation: Activation | None, shortcut: bool, masked: bool
) -> None:
    ours, theirs = (
        passes(norm, numbers("x", 12, CHANNELS, 3, 2), groups, shortcut, masked)
        for norm in make_norms(CHANNELS, activation)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("shortcut", [False, True])
def test_replicas_that_share_a_group_have_the_plain_path_s_numbers(
    activation: Activation | None, shortcut: bool
) -> None:
    count, x = 2, numbers("x", 8, CHANNELS, 3, 2)
    results: list[list[list[Tensor]]] = [[], []]
    for fused in (False, True):
        circle, each = Circle(count), [make_norms(CHANNELS, activation)[0] for _ in range(count)]

        def work(replica: int, circle: Circle = circle, each: list[BatchNormAct] = each, fused: bool = fused) -> None:
            norm = each[replica]
            norm.shared, norm.fused = circle.seat(replica), fused
            results[fused].append([torch.tensor(replica), *passes(norm, x.chunk(count)[replica], 1, shortcut, True)])

        in_threads(count, work)
    for ours, theirs in zip(*(sorted(each, key=lambda values: int(values[0])) for each in results), strict=True):
        assert_close(ours, theirs)


def test_images_in_any_order_of_memory_come_back_channels_last_and_may_be_changed_in_place() -> None:
    norm = make_norms(CHANNELS, "relu")[0]
    x, beside = numbers("x", 4, CHANNELS, 3, 2), numbers("beside", 4, CHANNELS, 3, 2)
    batch = Batch(x.new_zeros(1, 2 * CHANNELS))
    y = norm(x, batch, beside)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, norm(x.to(memory_format=torch.channels_last), batch, beside))
    norm(x, batch).mul_(2).sum().backward()
    assert norm.weight.grad is not None
    assert as_rows(y, 2).data_ptr() == y.data_ptr()  # rows are a view


@pytest.mark.parametrize(("shortcut", "tensors"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_little_is_kept_for_the_backward_pass(activation: Activation, shortcut: bool, tensors: int) -> None:
    norm = make_norms(CHANNELS, activation)[0]
    x = numbers("x", 4, CHANNELS, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    beside = x.detach().clone() if shortcut else None
    sizes: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        norm(x, Batch(x.new_zeros(1, 2 * CHANNELS)), beside)
    assert sizes.count(x.numel()) == tensors
    assert sum(sizes) - tensors * x.numel() == 5 * CHANNELS  # the weight and four constants of each channel


def test_a_pass_that_is_computed_again_has_the_same_gradients() -> None:
    norm = make_norms(CHANNELS, "silu")[0]
    x, batch = numbers("x", 4, CHANNELS, 3, 3).requires_grad_(), Batch(torch.zeros(2, 2 * CHANNELS).double())
    once = torch.autograd.grad(norm(x, batch).square().sum(), [x, norm.weight, norm.bias])
    y = checkpoint(lambda x: norm(x, batch).square(), x, use_reentrant=False, preserve_rng_state=False)
    again = torch.autograd.grad(y.sum(), [x, norm.weight, norm.bias])
    assert all(map(torch.equal, once, again))


def test_a_mean_of_30_standard_deviations_costs_no_digits() -> None:
    x = (numbers("x", 1, 4096, 8) + 60).float()
    mean, var = rows.moments(x)
    assert torch.allclose(mean.double(), x.double().mean(1), rtol=1e-6)
    assert torch.allclose(var.double(), x.double().var(1, correction=0), rtol=1e-4)


def test_evaluation_and_16_bits_are_as_in_the_plain_path() -> None:
    fused, plain = make_norms(CHANNELS, "relu")
    x = numbers("x", 4, CHANNELS, 3, 3)
    assert torch.equal(fused(x, None), plain(x, None))
    for norm in (fused, plain):
        norm.float()
    short = x.bfloat16().requires_grad_()
    outputs = [norm(short, Batch(torch.zeros(1, 2 * CHANNELS)), short) for norm in (fused, plain)]
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    assert torch.allclose(outputs[0], outputs[1], rtol=2**-7, atol=2**-7)
    outputs[0].sum().backward()
    assert short.grad is not None
    assert fused.weight.grad is not None
    assert (short.grad.dtype, fused.weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.fixture
def kernels() -> ModuleType:
    """The Triton kernels, interpreted."""
    interpret_kernels()
    from paceline.model.kernels import rows_triton

    return rows_triton


RAGGED = [(1, 4, 16, 16), (2, 3, 49, 24), (1, 2, 75, 130), (2, 1, 64, 256), (1, 3, 1, 7), (3, 2, 25, 64)]
"""Groups, images, rows of an image and channels: rows that are folded or not, in tiles that they fill or not."""


def compare_with_twin(
    kernels: ModuleType, shape: tuple[int, ...], activation: Activation | None, shortcut: bool, masked: bool
) -> None:
    groups, images, size, channels = shape
    dy, x = (numbers(name, groups, images * size, channels).float() for name in ("dy", "x"))
    beside = numbers("beside", *x.shape).float() if shortcut else None
    mask = factors_of(groups * images).float().view(groups, images) if masked else None
    ours, theirs = (row_passes(each, dy, x, activation, beside, mask) for each in (kernels, rows))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        scale = theirs[name].abs().max().item()
        assert torch.allclose(value.double(), theirs[name].double(), rtol=1e-5, atol=1e-5 * scale), name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shortcut", "masked"), [*product([False, True], repeat=2)])
def test_kernels_have_the_twin_s_numbers(
    kernels: ModuleType, activation: Activation | None, shortcut: bool, masked: bool
) -> None:
    compare_with_twin(kernels, (2, 3, 7, 5), activation, shortcut, masked)


@pytest.mark.parametrize("shape", RAGGED)
def test_kernels_have_the_twin_s_numbers_for_rows_of_any_shape(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    compare_with_twin(kernels, shape, "relu", False, False)
    compare_with_twin(kernels, shape, "silu", True, True)


@pytest.mark.parametrize("activation", ["silu", "hardswish"])
def test_activations_of_any_size_have_the_twin_s_numbers(kernels: ModuleType, activation: Activation) -> None:
    x = torch.tensor([-1e30, -200.0, -90.0, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 200.0, 1e30, torch.nan])
    x = x.repeat(5)[None, :, None].contiguous()
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    with np.errstate(over="ignore"):  # of the interpreter, where exp2 gives infinity
        ours, theirs = (
            [
                each.scale_shift(x, one, zero, activation),
                each.norm_gradient(x, x, one, zero, one, zero, zero, activation),
            ]
            for each in (kernels, rows)
        )
    for value, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_kernels_add_up_many_chunks_far_from_zero_to_the_digit(kernels: ModuleType) -> None:
    x = (numbers("x", 1, 1100, 64) + 60).float()
    tiles = kernels.tiles_of(x, None, loads=1)
    assert tiles.chunks(1, 4 * tiles.height, registers=64)[0] > 5
    mean, var = kernels.moments(x)
    assert torch.allclose(mean, x.double().mean(1), rtol=1e-7)
    assert torch.allclose(var, x.double().var(1, correction=0), rtol=1e-5)
    dy, ones = numbers("dy", *x.shape).float(), torch.ones(1, 64)
    sums, moments, _ = kernels.gradient_sums(dy, x, ones, ones, None)
    centered = moments - x.double().mean(1) * sums
    assert torch.allclose(centered, (dy * (x.double() - x.double().mean(1, keepdim=True))).sum(1), rtol=1e-4, atol=0.01)
