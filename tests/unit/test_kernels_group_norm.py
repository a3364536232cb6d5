"""Fused group norm and proxy norm: in float64 the plain path's numbers, and interpreted kernels have those of twins."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from interpreted import interpret_kernels
from norm_cases import ACTIVATIONS, factors_of, numbers
from paceline.model.batch import Batch
from paceline.model.kernels import group_norm, rows
from paceline.model.norm import GroupNormAct, ProxyNormAct
from paceline.settings.model import Activation

CHANNELS, GROUPS = 12, 3


def make_norm(activation: Activation | None, proxy: bool, fused: bool) -> GroupNormAct:
    """A norm in float64, for images whose channels have means of their own."""
    norm = (
        ProxyNormAct(CHANNELS, GROUPS, 1e-5, 0.03, activation)
        if proxy
        else GroupNormAct(CHANNELS, GROUPS, 1e-5, activation)
    )
    norm = norm.double()
    norm.fused = fused
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(numbers(name, CHANNELS))
    return norm


def images() -> Tensor:
    means = torch.linspace(-3, 30, CHANNELS).double()[:, None, None]
    return (numbers("x", 6, CHANNELS, 5, 3) + means).contiguous(memory_format=torch.channels_last)


def passes(norm: GroupNormAct, x: Tensor, shortcut: bool = False, masked: bool = False) -> list[Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    beside, dy = (numbers(name, *x.shape).to(x.dtype) for name in ("beside", "dy"))
    beside.requires_grad_()
    y = norm(x, Batch(x.new_zeros(1, 0)), beside if shortcut else None, factors_of(len(x)).to(x) if masked else None)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters(), *([beside] if shortcut else [])], dy)]


def assert_close(ours: list[Tensor], theirs: list[Tensor], *, limit: float = 1e-12) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max() / other.abs().max()) < limit


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shortcut", "masked"), [*product([False, True], repeat=2)])
def test_fused_group_norm_has_the_plain_path_s_numbers(
    activation: Activation | None, shortcut: bool, masked: bool
) -> None:
    assert_close(*(passes(make_norm(activation, False, fused), images(), shortcut, masked) for fused in (True, False)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_proxy_norm_has_the_plain_path_s_numbers(activation: Activation | None) -> None:
    assert_close(*(passes(make_norm(activation, True, fused), images()) for fused in (True, False)))


@pytest.mark.parametrize("proxy", [False, True])
def test_evaluation_has_the_plain_path_s_numbers_and_needs_no_gradient(proxy: bool) -> None:
    with torch.inference_mode():
        ours, theirs = (make_norm("silu", proxy, fused)(images(), None) for fused in (True, False))
    assert_close([ours], [theirs])
    assert ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("proxy", [False, True])
def test_a_pass_that_is_computed_again_has_the_same_gradients(proxy: bool) -> None:
    norm, x = make_norm("silu", proxy, True), images().requires_grad_()
    inputs = [x, *norm.parameters()]
    once = torch.autograd.grad(norm(x, None).square().sum(), inputs)
    y = checkpoint(lambda x: norm(x, None).square(), x, use_reentrant=False, preserve_rng_state=False)
    assert all(map(torch.equal, once, torch.autograd.grad(y.sum(), inputs)))


def test_little_is_kept_for_the_backward_pass() -> None:
    norm, x, sizes = make_norm("silu", False, True), images().requires_grad_(), list[int]()

    def keep(saved: Tensor) -> Tensor:
        sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        norm(x, None)
    assert sizes.count(x.numel()) == 1
    assert sum(sizes) - x.numel() == (1 + 4 * len(x)) * CHANNELS  # the weight, and four numbers of an image's channel


def test_a_frozen_input_needs_no_gradient() -> None:
    results = []
    for fused in (True, False):
        norm = make_norm("relu", True, fused)
        x = images().contiguous()  # in channels-last order torch 2.13's own pass dies if images want no gradient
        results.append([*torch.autograd.grad(norm(x, None).square().sum(), [*norm.parameters()])])
    assert_close(*results)


@pytest.mark.parametrize("proxy", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_interpreted_kernels_have_the_twin_s_numbers(
    monkeypatch: pytest.MonkeyPatch, activation: Activation | None, proxy: bool
) -> None:
    interpret_kernels()
    from paceline.model.kernels import norm, rows_triton

    results = []
    for kernels in (rows_triton, rows):
        for module in (norm, group_norm):
            monkeypatch.setattr(module, "rows_for", lambda x, kernels=kernels: kernels)
        results.append(passes(make_norm(activation, proxy, True).float(), images().float()))
    assert_close(*results, limit=1e-5)
