"""The pieces networks are made of: windows that are adaptive pooling, and norms with the numbers that count."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.layers import ConvNorm, MakeNorm, Windows, conv
from paceline.model.norm import BatchNormAct, GroupNormAct, NormAct, ProxyNormAct
from paceline.settings.model import Activation
from paceline.settings.recipe import BatchNorm, GroupNorm, NoNorm


def wave(*shape: int) -> Tensor:
    """Numbers that look like nothing in particular and are the same everywhere."""
    return torch.sin(0.7 * torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).view(shape)


@pytest.mark.parametrize("side", [1, 2, 4, 6, 7])
@pytest.mark.parametrize(("rows", "columns"), [*pairwise(range(1, 10)), (8, 7), (14, 14), (15, 15), (31, 4)])
def test_windows_are_adaptive_pooling(side: int, rows: int, columns: int) -> None:
    x = wave(2, 3, rows, columns).requires_grad_()
    ours, theirs = Windows(side)(x), F.adaptive_avg_pool2d(x, side)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
    weights = wave(2, 3, side, side)
    (gradient,), (expected,) = (torch.autograd.grad((y * weights).sum(), x) for y in (ours, theirs))
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-14)


def test_windows_leave_a_picture_of_their_side_as_it_is() -> None:
    x = wave(2, 3, 5, 5)
    assert Windows(5)(x) is x


@pytest.mark.parametrize(
    ("settings", "epsilon", "momentum"),
    [
        (BatchNorm(name="batch"), 0.001, 0.01),
        (BatchNorm(name="batch", epsilon=0.5), 0.5, 0.01),
        (BatchNorm(name="batch", momentum=0.3), 0.001, 0.3),
    ],
)
def test_what_a_network_was_published_with_counts_where_the_recipe_names_nothing(
    settings: BatchNorm, epsilon: float, momentum: float
) -> None:
    norm = MakeNorm(settings).published(epsilon=0.001, momentum=0.01)(8)
    assert isinstance(norm, BatchNormAct)
    assert (norm.epsilon, norm.momentum) == (epsilon, momentum)
    plain = MakeNorm(BatchNorm(name="batch"))(8)
    assert isinstance(plain, BatchNormAct)
    assert (plain.epsilon, plain.momentum) == (1e-5, 0.1)


@pytest.mark.parametrize("proxy", [False, True])
@pytest.mark.parametrize(("given", "epsilon"), [(None, 0.001), (0.5, 0.5)])
def test_group_norms_take_the_published_epsilon_too(proxy: bool, given: float | None, epsilon: float) -> None:
    make_norm = MakeNorm(GroupNorm(name="group", groups=4, epsilon=given, proxy=proxy, proxy_epsilon=0.2))
    norm = make_norm.published(epsilon=0.001)(8)
    assert isinstance(norm, GroupNormAct)
    assert (norm.groups, norm.epsilon) == (4, epsilon)
    assert isinstance(norm, ProxyNormAct) == proxy
    assert getattr(norm, "proxy_epsilon", 0.2) == 0.2


@pytest.mark.parametrize("settings", [BatchNorm(name="batch"), GroupNorm(name="group"), NoNorm(name="none")])
@pytest.mark.parametrize("activation", [None, "relu", "hardswish"])
def test_a_norm_has_the_activation_and_the_role_it_is_made_for(
    settings: BatchNorm | GroupNorm | NoNorm, activation: Activation | None
) -> None:
    norm = MakeNorm(settings)(8, activation, "branch")
    assert (norm.activation, norm.role) == (activation, "branch")
    assert (MakeNorm(settings)(8).activation, MakeNorm(settings)(8).role) == ("relu", "plain")


def test_no_norm_is_a_scale_and_a_shift() -> None:
    assert type(MakeNorm(NoNorm(name="none"))(8)) is NormAct


@pytest.mark.parametrize(("size", "stride", "side"), [(1, 1, 9), (3, 1, 9), (5, 1, 9), (3, 2, 5), (7, 2, 5)])
def test_a_convolution_keeps_the_side_or_halves_it(size: int, stride: int, side: int) -> None:
    made = conv(4, 6, size, stride, groups=2)
    assert made.bias is None
    assert made.weight.shape == (6, 2, size, size)
    assert made(torch.ones(1, 4, 9, 9)).shape == (1, 6, side, side)


def test_convolution_then_norm_then_activation() -> None:
    part = ConvNorm(nn.Conv2d(2, 3, 1, bias=False), MakeNorm(NoNorm(name="none")), "relu6").double()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(9 * wave(*parameter.shape) + 1)
    x = wave(2, 2, 4, 4)
    y = F.conv2d(x, part.conv.weight) * part.norm.weight[:, None, None] + part.norm.bias[:, None, None]
    assert torch.allclose(part(x, None), y.clamp(0, 6), rtol=1e-12, atol=1e-12)
    assert y.min() < 0
    assert y.max() > 6
