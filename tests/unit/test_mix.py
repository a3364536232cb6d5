"""Mixup and cutmix: who mixes with whom, how much, and that nothing but seed and position decides it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_plan, make_recipe
from paceline.augment.mix import ROWS, betas, draw_mix, mix
from paceline.command.verify_layouts import choose_layouts
from paceline.errors import PlanError, SpecError
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.recipe import Recipe

MANY = np.arange(20_000, dtype=np.int64)
BOTH = "mix={mixup: 0.2, cutmix: {name: uniform, low: 0.3}}"


def recipe(mix: str) -> Recipe:
    return make_recipe(f"mix={mix}")


def draw(settings: Recipe, positions: Int64s, side: int) -> Float64s:
    rows = draw_mix(settings, positions, side)
    assert rows is not None
    return rows


def areas(rows: Float64s, side: int) -> Float64s:
    _, top, left, bottom, right = rows
    return np.asarray((bottom - top) * (right - left) / side**2)


@pytest.mark.parametrize("alpha", [1e-300, 1e-5, 0.1, 0.2, 0.5, 1.0])
def test_shares_have_the_mean_and_spread_of_a_beta_distribution(alpha: float) -> None:
    found = betas(1, MANY, alpha)
    assert found.min() >= 0
    assert found.max() <= 1
    assert found.mean() == pytest.approx(0.5, abs=0.015)
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


@given(st.integers(0, 2**40), st.integers(1, 30), st.integers(1, 30))
def test_what_is_drawn_for_an_image_does_not_depend_on_its_batch(start: int, before: int, count: int) -> None:
    settings = make_recipe(BOTH)
    positions = np.arange(start, start + before + count, dtype=np.int64)
    whole = draw(settings, positions, 32)
    assert np.array_equal(whole[:, before:], draw(settings, positions[before:], 32))


def test_another_seed_draws_something_else() -> None:
    one, other = (draw(make_recipe(BOTH, f"seed={seed}"), MANY[:50], 32) for seed in (0, 1))
    assert all(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_image_keeps_the_larger_share_unless_told_otherwise() -> None:
    assert draw(recipe("{mixup: 0.5}"), MANY, 32)[0].min() >= 0.5
    assert draw(recipe("{mixup: 0.5, mixup_larger: false}"), MANY, 32)[0].min() < 0.1


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ("{name: fixed, kept: 0.75}", 0.75),
        ("{name: uniform, low: 0.4, high: 0.8}", 0.6),
        ("{name: beta, alpha: 1.0}", 0.5),
        # With a chance of 1.55 * 0.85 - 0.96 nothing is cut; else the mean of 1 + ln(u) / 4 is kept.
        ("{name: logarithmic, kept: 0.85}", 0.3575 + 0.6425 * (1 + (-1 - math.exp(-4) * -4 / (1 - math.exp(-4))) / 4)),
    ],
)
def test_each_kind_of_cut_keeps_the_share_it_says(cut: str, kept: float) -> None:
    rows = draw(recipe(f"{{cutmix: {cut}}}"), MANY, 200)
    assert 1 - areas(rows, 200).mean() == pytest.approx(kept, abs=0.01)


def test_boxes_lie_inside_the_image_and_reach_every_corner() -> None:
    _, top, left, bottom, right = draw(recipe("{cutmix: {name: fixed, kept: 0.75}}"), MANY, 32)
    assert (top.min(), left.min(), bottom.max(), right.max()) == (0, 0, 32, 32)
    assert np.array_equal(bottom - top, right - left)


def test_cutmix_is_for_a_share_of_the_images() -> None:
    rows = draw(recipe("{cutmix: {name: fixed, kept: 0.5}, cutmix_probability: 0.3}"), MANY, 32)
    assert (areas(rows, 32) > 0).mean() == pytest.approx(0.3, abs=0.02)


def test_a_switch_gives_each_image_one_of_the_two() -> None:
    rows = draw(recipe("{mixup: 0.5, cutmix: {name: fixed, kept: 0.5}, switch_probability: 0.25}"), MANY, 32)
    cut = areas(rows, 32) > 0
    assert cut.mean() == pytest.approx(0.25, abs=0.02)
    assert np.all(rows[0][cut] == 1)
    assert (rows[0][~cut] < 1).mean() > 0.99


def test_pixels_and_labels_come_from_the_right_neighbors_in_the_right_amounts() -> None:
    images = torch.arange(8.0, dtype=torch.float64)[:, None, None, None].expand(8, 1, 4, 4).clone()
    labels = torch.arange(8) * 10
    drawn = torch.zeros(len(ROWS), 8, dtype=torch.float64)
    drawn[0] = torch.linspace(0.5, 0.85, 8, dtype=torch.float64)
    drawn[3], drawn[4] = 2, 2  # the upper left quarter is pasted
    mixed, terms, weights = mix(images, labels, drawn, 4)
    for i in range(8):
        ring = [i - i % 4 + (i % 4 + k) % 4 for k in range(4)]
        own = drawn[0]
        blend = own[ring[0]] * ring[0] + (1 - own[ring[0]]) * ring[1]
        pasted = own[ring[2]] * ring[2] + (1 - own[ring[2]]) * ring[3]
        assert torch.allclose(mixed[i, 0, 2:], blend.expand(2, 4))
        assert torch.allclose(mixed[i, 0, :2, :2], pasted.expand(2, 2))
        assert terms[i].tolist() == [10 * n for n in ring]
        expected = [own[i] * 0.75, (1 - own[i]) * 0.75, own[ring[2]] * 0.25, (1 - own[ring[2]]) * 0.25]
        assert weights[i].tolist() == pytest.approx([float(e) for e in expected])
    assert torch.allclose(weights.sum(1), torch.ones(8, dtype=torch.float64))


def test_blocks_of_two_paste_from_the_other_one() -> None:
    images = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 2).clone()
    drawn = torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4, [2.0] * 4, [2.0] * 4])
    mixed, terms, weights = mix(images, torch.arange(4), drawn, 2)
    assert mixed[:, 0, 0, 0].tolist() == [1, 0, 3, 2]
    assert terms[:, 2].tolist() == [1, 0, 3, 2]
    assert weights.tolist() == [[0, 0, 1, 0]] * 4


def test_mixing_does_not_reach_beyond_a_block() -> None:
    settings = make_recipe(BOTH)
    images = torch.rand(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = torch.from_numpy(draw(settings, MANY[:8], 6))
    whole = mix(images, torch.arange(8), drawn, 4)
    halves = [mix(images[p], torch.arange(8)[p], drawn[:, p], 4) for p in (slice(0, 4), slice(4, 8))]
    for number, part in enumerate(whole):
        assert torch.equal(part, torch.cat([half[number] for half in halves]))


def test_a_block_that_does_not_divide_the_micro_batch_is_refused_with_what_fits() -> None:
    with pytest.raises(PlanError, match=r"mix.block 4 does not divide on.micro_batch 2, .* fits is on.micro_batch=4"):
        make_plan("mix.mixup=0.2", "on.micro_batch=2", "norm=group")
    with pytest.raises(PlanError, match=r"mix.block 5 does not divide .* no micro-batch .* fits; write mix.block=4"):
        make_plan("mix.mixup=0.2", "mix.block=5", "on.micro_batch=4")
    assert make_plan("on.micro_batch=1", "norm=group").micro_batch == 1  # nothing is mixed


def test_an_automatic_micro_batch_holds_whole_blocks() -> None:
    words = ("mix.mixup=0.2", "mix.block=16", "norm_batch=8", "global_batch=64", "on.replicas=8")
    assert make_plan(*words).micro_batch % 16 == 0


@pytest.mark.parametrize("alpha", ["2", "1.0000001", "-0.1"])
def test_an_alpha_that_cannot_be_drawn_by_is_refused(alpha: str) -> None:
    with pytest.raises(SpecError, match=rf"mix.mixup: expected the alpha of Beta.*at most 1.* found {alpha}"):
        make_recipe(f"mix.mixup={alpha}")


@pytest.mark.parametrize("alpha", [".inf", ".nan", "much"])
def test_an_alpha_that_is_no_finite_number_is_refused(alpha: str) -> None:
    with pytest.raises(SpecError, match=r"mix.mixup: .*number, found"):
        make_recipe(f"mix.mixup={alpha}")


def test_an_alpha_of_zero_mixes_nothing() -> None:
    assert not make_recipe("mix.mixup=0").mix.active
    assert make_recipe("mix.mixup=1").mix.active


def test_a_switch_without_both_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mix.switch_probability chooses between mixup and cutmix"):
        make_plan("mix={mixup: 0.2, switch_probability: 0.5}")


@pytest.mark.parametrize(
    "words", [("norm=group",), ("norm_batch=4",), ("norm_batch=16", "mix.block=8"), ("global_batch=24", "norm_batch=8")]
)
def test_verify_finds_layouts_that_keep_neighbors_together(words: tuple[str, ...]) -> None:
    settings = make_recipe("mix.mixup=0.2", *words)
    assert all(layout.micro_batch % settings.mix.block == 0 for layout in choose_layouts(settings))
    assert choose_layouts(settings)
