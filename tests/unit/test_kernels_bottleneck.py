"""The fused bottleneck: in float64 the plain unit's numbers, alone, in a row, across replicas and computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bottleneck_cases import (
    NORM,
    assert_equal_to_rounding,
    distance,
    make_unit,
    passes,
    passes_of_replicas,
    pictures,
    same_numbers,
)
from paceline.model.batch import Batch
from paceline.model.kernels import gram
from paceline.model.kernels.bottleneck import can_fuse, compute_weight, fused_bottleneck, pays
from paceline.model.layers import MakeNorm
from paceline.model.network import Network, recomputing
from paceline.model.norm import Statistics
from paceline.model.resnet import ResidualShape, ResidualUnit
from paceline.settings.recipe import GroupNorm, NoNorm


def both_forms(unit: ResidualUnit, x: Tensor, groups: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the fused form gives, and the plain one."""
    assert can_fuse(unit)
    return (
        passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), x, groups),
        passes(unit, unit, x, groups),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "width", "stride", "cardinality", "side"),
    [
        (256, 64, 1, 1, 5),  # no projection
        (64, 64, 1, 1, 6),
        (256, 128, 2, 1, 6),
        (256, 128, 2, 1, 7),
        (256, 64, 1, 32, 6),
        (256, 128, 2, 32, 7),
    ],
)
def test_the_fused_bottleneck_equals_the_plain_one(
    groups: int, inputs: int, width: int, stride: int, cardinality: int, side: int
) -> None:
    unit = make_unit(inputs, width, stride, cardinality)
    assert_equal_to_rounding(*both_forms(unit, pictures(4, inputs, side), groups))


def test_a_projection_without_a_change_of_shape_equals_the_plain_one_too() -> None:
    unit = ResidualUnit(256, 64, 1, ResidualShape(True, False, "projection"), NORM, project=True).double()
    assert unit.projects
    assert_equal_to_rounding(*both_forms(unit, pictures(4, 256, 5), 2))


def test_images_in_any_order_of_memory_come_back_channels_last() -> None:
    unit, x = make_unit(256, 128, 2), pictures(4, 256, 6)
    ours, theirs = (passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), each) for each in (x, x.clone()))
    assert_equal_to_rounding(passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), x.contiguous()), theirs)
    assert all(map(torch.equal, ours, theirs))
    assert ours[0].is_contiguous(memory_format=torch.channels_last)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.function(*args)


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How often a gradient is masked by a pass of its own."""
    counted = Counted(gram.masked)
    monkeypatch.setattr(gram, "masked", counted)
    return counted


def make_row() -> Network:
    """Three bottlenecks, the second of which keeps the shape."""
    units = [make_unit(64, 64), make_unit(256, 64), make_unit(256, 128, 2)]
    return Network(OrderedDict(zip(("first", "second", "third"), units, strict=True)))


def units_of(network: Network) -> list[ResidualUnit]:
    return [unit for unit in network if isinstance(unit, ResidualUnit)]


@pytest.mark.parametrize("groups", [1, 2])
def test_units_in_a_row_hand_masked_gradients_over(masked: Counted, groups: int) -> None:
    network, x = make_row(), pictures(4, 64, 6)

    def forward(x: Tensor, batch: Batch) -> Tensor:
        for unit in units_of(network):
            x = fused_bottleneck(unit, x, batch)
        return x

    ours = passes(network, forward, x, groups)
    assert masked.calls == 1  # the last unit's, whose output nobody has masked
    assert_equal_to_rounding(ours, passes(network, lambda x, batch: network(x, batch=batch), x, groups))


@pytest.mark.parametrize("plain_first", [False, True])
def test_what_is_read_twice_has_the_gradients_of_both_readers(masked: Counted, plain_first: bool) -> None:
    network = make_row()
    first, second, third = units_of(network)

    def forward(unit: Callable[[ResidualUnit, Tensor, Batch], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
        def run(x: Tensor, batch: Batch) -> Tensor:
            between = unit(first, x, batch)
            aside = (between * same_numbers(between)).sum() if plain_first else 0
            y, z = unit(second, between, batch), unit(third, between, batch)
            aside = aside if plain_first else (between * same_numbers(between)).sum()
            return (y * same_numbers(y)).sum() + (z * same_numbers(z)).sum() + aside

        return run

    one, x = torch.ones((), dtype=torch.float64), pictures(4, 64, 6)
    ours = passes(network, forward(fused_bottleneck), x, dy=one)
    assert masked.calls == 3
    assert_equal_to_rounding(ours, passes(network, forward(lambda unit, x, batch: unit(x, batch)), x, dy=one))


def test_two_backward_passes_give_the_same_gradients() -> None:
    network, x = make_row(), pictures(4, 64, 6)
    statistics = Statistics(network, 1, 1)
    batch = Batch(statistics.pass_rows(0))
    y = x
    for unit in units_of(network):
        y = fused_bottleneck(unit, y, batch)
    once, again = (torch.autograd.grad(y.square().sum(), [*network.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize(("inputs", "width", "stride"), [(256, 64, 1), (256, 128, 2)])
def test_replicas_that_share_a_group_have_the_numbers_of_one_group_over_all_images(
    inputs: int, width: int, stride: int
) -> None:
    unit, x = make_unit(inputs, width, stride), pictures(4, inputs, 6)
    x[:2] += (x[:2] > 0) * 0.5  # replicas whose means differ
    whole = passes(unit, unit, x)
    assert_equal_to_rounding(passes_of_replicas(unit, fused_bottleneck, x, same_numbers(whole[0])), whole)


def test_units_that_are_computed_again_have_the_same_gradients(masked: Counted) -> None:
    network, x = make_row(), pictures(16, 64, 8)
    for unit in units_of(network):
        unit.fused = True
    ours = passes(network, lambda x, batch: network(x, batch=batch), x)
    assert masked.calls == 1  # the third unit has too few rows, and so is plain
    again = recomputing(network.cut(["second", "third"]))
    assert all(map(torch.equal, ours, passes(network, lambda x, batch: again(x, batch=batch), x)))
    for unit in units_of(network):
        unit.fused = False
    assert_equal_to_rounding(ours, passes(network, lambda x, batch: network(x, batch=batch), x))


def test_nothing_before_the_first_unit_needs_no_gradient_of_images() -> None:
    unit, x = make_unit(256, 128, 2), pictures(4, 256, 6)
    theirs = passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), x)
    ours = passes(unit, lambda x, batch: fused_bottleneck(unit, x.detach(), batch) + 0 * x.sum(), x)
    assert not ours[2].any()
    assert all(map(torch.equal, ours[3:], theirs[3:]))


def test_16_bits_are_no_further_from_float64_than_autocast() -> None:
    unit, x = make_unit(256, 64), pictures(8, 256, 8).bfloat16()
    exact = passes(unit, unit, x.double())
    unit.float()

    def autocast(x: Tensor, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = unit(x, batch)
            return y

    ours = passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), x)
    for one, other, value in zip(ours, passes(unit, autocast, x), exact, strict=True):
        assert one.dtype == other.dtype
        assert distance(one, value) <= 1.1 * distance(other, value)


def test_gradients_of_16_bit_weights_are_in_the_type_in_which_they_add_up() -> None:
    unit, x = make_unit(256, 64).float(), pictures(8, 256, 8).bfloat16()
    for layer in (unit.conv1, unit.conv2, unit.conv3):
        layer.bfloat16()
        layer.weight.grad_dtype = torch.float32
    ours = passes(unit, lambda x, batch: fused_bottleneck(unit, x, batch), x)
    assert [value.dtype for value in ours[:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert {gradient.dtype for gradient in ours[3:]} == {torch.float32}


def test_the_copy_of_a_weight_that_was_made_for_the_step_is_the_one_that_is_used() -> None:
    layer = make_unit(256, 64).conv1
    assert compute_weight(layer, torch.float32).dtype == torch.float32
    layer.step_weight = layer.weight.detach().bfloat16()
    assert compute_weight(layer, torch.float32) is layer.step_weight


BOTTLENECK = ResidualShape(True, False, "projection")


@pytest.mark.parametrize(
    "unit",
    [
        ResidualUnit(64, 64, 1, ResidualShape(False, False, "projection"), NORM),
        ResidualUnit(256, 128, 2, ResidualShape(True, False, "projection", blur=True), NORM),
        ResidualUnit(64, 16, 1, BOTTLENECK, NORM),
        ResidualUnit(192, 96, 1, BOTTLENECK, NORM),
        ResidualUnit(256, 128, 2, ResidualShape(True, True, "projection"), NORM),
        ResidualUnit(256, 64, 1, BOTTLENECK, MakeNorm(GroupNorm(name="group"))),
        ResidualUnit(256, 64, 1, BOTTLENECK, MakeNorm(NoNorm(name="none"))),
    ],
    ids=["basic", "blur", "16 channels", "96 channels", "stride first", "group norm", "no norm"],
)
def test_units_of_another_form_are_refused(unit: ResidualUnit) -> None:
    assert not can_fuse(unit)


@pytest.mark.parametrize(
    "unit",
    [
        ResidualUnit(256, 64, 1, ResidualShape(True, True, "projection"), NORM),  # v1 without a stride
        ResidualUnit(256, 128, 1, ResidualShape(True, False, "projection", blur=True), NORM),
        ResidualUnit(64, 64, 1, ResidualShape(True, False, "projection", 32, 2.0), NORM),
    ],
    ids=["v1", "blur without stride", "resnext"],
)
def test_what_makes_no_difference_to_a_unit_is_no_reason_to_refuse_it(unit: ResidualUnit) -> None:
    assert can_fuse(unit)


def test_norm_groups_pay_from_16_rows_for_each_channel_on() -> None:
    same, halved = make_unit(256, 64), make_unit(256, 128, 2)
    assert pays(same, 16, 8)
    assert not pays(same, 15, 8)
    assert pays(halved, 16, 32)  # 256 channels of the projection at side 16
    assert pays(halved, 16, 31)
    assert not pays(halved, 16, 30)
    assert not pays(halved, 15, 32)
