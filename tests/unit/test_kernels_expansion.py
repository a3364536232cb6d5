"""A widening 1x1 convolution fused with its norm and activation: the plain layers' numbers, in both passes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bottleneck_cases import NORM, assert_equal_to_rounding, distance, passes, passes_of_replicas, ready, same_numbers
from interpreted import interpret_kernels
from paceline.model.batch import Batch
from paceline.model.kernels import expand, gram
from paceline.model.kernels.expansion import expansion_pays, fused_expansion
from paceline.model.kernels.rows import Normed
from paceline.model.kernels.tiles import Tile
from paceline.model.layers import ConvNorm, MakeNorm, conv
from paceline.model.norm import BatchNormAct, Statistics
from paceline.settings.model import Activation
from paceline.settings.recipe import GroupNorm

ACTIVATIONS: list[Activation | None] = ["silu", "hardswish", "relu", "relu6", None]


def make_layer(inputs: int = 8, outputs: int = 40, activation: Activation | None = "silu") -> ConvNorm:
    return ready(ConvNorm(conv(inputs, outputs, 1), NORM, activation))


def pictures(images: int = 6, channels: int = 8) -> Tensor:
    """Images whose channels have means of their own, as they come from a norm and a shortcut."""
    x = torch.randn(images, channels, 5, 4, dtype=torch.float64) + torch.linspace(-2, 3, channels)[:, None, None]
    return x.contiguous(memory_format=torch.channels_last)


def fused(layer: ConvNorm, x: Tensor, batch: Batch) -> Tensor:
    assert layer.can_expand()
    assert isinstance(layer.norm, BatchNormAct)
    return fused_expansion(layer.conv, layer.norm, x, batch)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_pass_is_the_plain_one_in_float64(activation: Activation | None, groups: int) -> None:
    layer, x = make_layer(activation=activation), pictures()
    ours = passes(layer, lambda x, batch: fused(layer, x, batch), x, groups)
    assert_equal_to_rounding(ours, passes(layer, layer, x, groups))
    assert ours[0].is_contiguous(memory_format=torch.channels_last)


def test_images_in_any_order_of_memory_are_the_same() -> None:
    layer, x = make_layer(), pictures()
    ours, theirs = (passes(layer, lambda x, batch: fused(layer, x, batch), each) for each in (x.contiguous(), x))
    assert_equal_to_rounding(ours, theirs)


def test_a_layer_takes_the_fused_form_where_groups_have_rows_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer(), pictures()
    assert expansion_pays(x[:, :, :1, :1].expand(-1, -1, 32, 64), 96)
    assert not expansion_pays(x[:, :, :1, :1].expand(-1, -1, 32, 64), 97)
    plain = passes(layer, layer, x)
    layer.expands = True
    assert all(map(torch.equal, plain, passes(layer, layer, x)))  # 120 rows are too few
    monkeypatch.setattr("paceline.model.kernels.expansion.ROWS_PER_CHANNEL", 15)
    ours = passes(layer, layer, x)
    assert not all(map(torch.equal, plain, ours))
    assert_equal_to_rounding(ours, plain)
    assert torch.equal(layer(x, None), layer.norm(layer.conv(x), None))  # evaluation has its own form


def test_only_convolutions_that_widen_can_take_it() -> None:
    group_norm = MakeNorm(GroupNorm(name="group", groups=2))
    for layer, can in [
        (make_layer(), True),
        (make_layer(128, 256), True),
        (make_layer(136, 272), False),  # more than a tile holds
        (make_layer(24, 40), False),  # hardly wider
        (make_layer(12, 48), False),
        (ConvNorm(conv(8, 40, 3), NORM), False),
        (ConvNorm(conv(8, 40, 1, 2), NORM), False),
        (ConvNorm(conv(8, 40, 1, groups=8), NORM), False),
        (ConvNorm(conv(8, 40, 1), group_norm), False),
    ]:
        assert layer.can_expand() is can


def test_replicas_that_share_a_group_have_the_numbers_of_one_group_over_all_images() -> None:
    layer, x = make_layer(), pictures(4)
    x[:2] += 0.5  # replicas whose means differ
    whole = passes(layer, layer, x)
    assert_equal_to_rounding(passes_of_replicas(layer, fused, x, same_numbers(whole[0])), whole)


def test_a_pass_that_is_computed_again_has_the_same_gradients() -> None:
    layer, x = make_layer(), pictures()

    def again(x: Tensor, batch: Batch) -> Tensor:
        y = checkpoint(fused, layer, x, batch, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(y, Tensor)
        return y

    assert all(
        map(torch.equal, passes(layer, lambda x, batch: fused(layer, x, batch), x, 2), passes(layer, again, x, 2))
    )


def test_a_frozen_input_needs_no_gradient() -> None:
    layer, x = make_layer(), pictures()
    batch = Batch(Statistics(layer, 1, 1).pass_rows(0))
    found = [torch.autograd.grad(form(x, batch).square().sum(), [*layer.parameters()])
             for form in (layer, lambda x, batch: fused(layer, x, batch))]  # fmt: skip
    assert_equal_to_rounding(*found)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels, interpreted, with small tiles."""
    interpret_kernels()
    from paceline.model.kernels import expand_triton

    for tile in ("SUMS", "SMALL"):
        monkeypatch.setattr(expand_triton, tile, Tile(32, 16, 0, 4, 3))
    return expand_triton


@pytest.mark.parametrize(
    ("groups", "rows", "inputs", "outputs"), [(2, 75, 24, 56), (1, 64, 16, 48), (3, 40, 8, 24), (1, 70, 64, 128)]
)
@pytest.mark.parametrize("activation", ["silu", "relu6", None])
def test_interpreted_kernels_have_the_numbers_of_their_twins(
    ours: ModuleType, activation: Activation | None, groups: int, rows: int, inputs: int, outputs: int
) -> None:
    from paceline.model.kernels import gram_triton

    x, dy = torch.randn(groups, rows, inputs), torch.randn(groups, rows, outputs)
    weight, scale, shift = torch.randn(outputs, inputs) / 4, torch.rand(groups, outputs), torch.randn(groups, outputs)
    found = []
    for kernels, small in ((ours, gram_triton), (expand, gram)):
        scatter = small.row_scatter(x)
        moments, weight_scatter = small.widened_moments(weight, scatter, rows)
        normed = Normed(moments.mean, torch.rsqrt(moments.var + 1e-3), scale, shift)
        sums = kernels.expansion_sums(dy, x, weight, scale, shift, activation)
        *parameters, widened = small.widened_gradient(*sums, weight, scatter, weight_scatter, normed, rows, x.dtype)
        dx = kernels.expansion_gradient(dy, x, weight, scale, shift, activation, widened)
        found.append([kernels.expanded(x, weight, scale, shift, activation), *scatter, *moments, weight_scatter, *sums,
                      *parameters, *widened, dx])  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < 2e-6
