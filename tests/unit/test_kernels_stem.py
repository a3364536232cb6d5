"""The fused stem: in float64 the plain one's numbers; its weights in fours are the same weights."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bottleneck_cases import NORM, assert_equal_to_rounding, distance, make_stem, passes, same_numbers
from paceline.model.batch import Batch
from paceline.model.kernels import pool, stem
from paceline.model.kernels.stem import CHANNELS, can_fuse_stem, fits_stem, from_fours, fused_stem, in_fours
from paceline.model.layers import MakeNorm
from paceline.model.norm import Statistics
from paceline.model.resnet import Stem
from paceline.settings.recipe import GroupNorm
from replicas_made import Circle, in_threads


def images(count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side, dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("side", "outputs"), [(24, 64), (20, 32)])
def test_the_fused_stem_equals_the_plain_one(groups: int, side: int, outputs: int) -> None:
    one, x = make_stem(outputs), images(4, side)
    assert can_fuse_stem(one)
    ours = passes(one, lambda x, batch: fused_stem(one, x, batch, torch.float64), x, groups)
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    assert_equal_to_rounding(ours, passes(one, one, x, groups))
    last = x.contiguous(memory_format=torch.channels_last)
    assert_equal_to_rounding(passes(one, lambda x, batch: fused_stem(one, x, batch, torch.float64), last, groups), ours)


def test_replicas_that_share_a_group_have_the_numbers_of_one_group_over_all_images() -> None:
    count, one, x = 2, make_stem(16), images(4, 16)
    x[:2] += 0.5  # replicas whose means differ
    whole = passes(one, one, x)
    dy, circle = same_numbers(whole[0]), Circle(count)
    stems, results = [deepcopy(one) for _ in range(count)], [list[Tensor]() for _ in range(count)]

    def work(replica: int) -> None:
        own = stems[replica]
        results[replica] = passes(
            own, lambda x, batch: fused_stem(own, x, batch, torch.float64), x.chunk(count)[replica], 1,
            circle.seat(replica), dy.chunk(count)[replica],
        )  # fmt: skip

    in_threads(count, work)
    y, *rest = zip(*results, strict=True)
    assert_equal_to_rounding([torch.cat(y), *(torch.stack(each).sum(0) for each in rest)], whole)


@pytest.mark.parametrize("inputs", [1, 3, 4])
def test_weights_in_fours_make_the_same_convolution(inputs: int) -> None:
    weight, x = torch.randn(8, inputs, 7, 7).double(), torch.randn(2, inputs, 12, 16).double()
    ours = F.conv2d(pool.unshuffle(x, torch.float64, CHANNELS), in_fours(weight, torch.float64))
    assert distance(ours, F.conv2d(x, weight, stride=2, padding=3)) < 1e-12


@pytest.mark.parametrize("inputs", [1, 3, 4])
def test_weights_in_fours_and_their_gradients_are_inverse_and_adjoint(inputs: int) -> None:
    weight, gradient = torch.randn(8, inputs, 7, 7).double(), torch.randn(8, CHANNELS, 4, 4).double()
    fours = in_fours(weight, torch.float64)
    assert fours.shape == gradient.shape
    assert torch.equal(from_fours(fours, weight), weight)
    there, back = (fours * gradient).sum(), (weight * from_fours(gradient, weight)).sum()
    assert float(there) == pytest.approx(float(back), rel=1e-12)


@pytest.mark.parametrize(("side", "fused"), [(24, True), (22, False), (23, False), (25, False)])
def test_sides_that_cannot_be_halved_twice_take_the_plain_stem(
    side: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, x = make_stem(16), images(4, side)
    assert fits_stem(x) == fused
    plain, called = passes(one, one, x, 2), list[bool]()

    def counted(weight: Tensor, dtype: torch.dtype) -> Tensor:
        called.append(True)
        return in_fours(weight, dtype)

    monkeypatch.setattr(stem, "in_fours", counted)
    one.fused = torch.float64
    assert_equal_to_rounding(passes(one, one, x, 2), plain)
    assert bool(called) == fused


def test_evaluation_takes_the_plain_stem() -> None:
    one, x = make_stem(16), images(4, 24)
    plain = one(x, None)
    one.fused = torch.float64
    assert torch.equal(one(x, None), plain)


def test_16_bits_are_no_further_from_float64_than_autocast() -> None:
    one, x = make_stem(), images(4, 24).bfloat16().double()
    exact = passes(one, one, x)
    one.float()

    def autocast(x: Tensor, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = one(x, batch)
            return y

    ours = passes(one, lambda x, batch: fused_stem(one, x, batch, torch.bfloat16), x.float())
    for mine, other, value in zip(ours, passes(one, autocast, x.float()), exact, strict=True):
        assert mine.dtype == other.dtype
        assert distance(mine, value) <= 1.1 * distance(other, value)


def test_gradients_of_16_bit_weights_are_in_the_type_in_which_they_add_up() -> None:
    one = make_stem().float()
    one.conv.bfloat16()
    one.conv.weight.grad_dtype = torch.float32
    statistics = Statistics(one, 1, 1)
    y = fused_stem(one, images(4, 24).float(), Batch(statistics.pass_rows(0)), torch.bfloat16)
    y.sum().backward()
    assert one.conv.weight.grad is not None
    assert one.conv.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "one",
    [
        Stem(3, 64, False, NORM),
        Stem(3, 96, True, NORM),
        Stem(5, 64, True, NORM),
        Stem(3, 64, True, MakeNorm(GroupNorm(name="group"))),
    ],
    ids=["3x3", "96 outputs", "5 inputs", "group norm"],
)
def test_stems_of_another_form_are_refused(one: Stem) -> None:
    assert not can_fuse_stem(one)
