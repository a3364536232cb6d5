"""What `verify` tries and how it judges: layouts of every kind, and no difference that is let through."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import make_recipe
from paceline.command.verify import ENOUGH, FIRST_LOSS_LIMIT, LIMIT, STEP_COLUMNS, judge
from paceline.command.verify_layouts import choose_layouts, shrink
from paceline.layouts import fits
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.data import Made
from paceline.settings.recipe import BatchNorm, Recipe
from paceline.training.differences import relative_difference
from paceline.training.trials import Outcome, compare_outcomes

STEPS = dict.fromkeys([*STEP_COLUMNS, "largest_difference"], 0.0)
AMPLIFIED = {"amplification": 1.0, "amplified": "loss, step 1", "first_loss_amplification": 1.0}


def row(**values: Any) -> dict[str, Any]:
    return STEPS | {"float32_first_loss": 0.0} | values


def resume(**values: Any) -> dict[str, Any]:
    return STEPS | {"bitwise": True, "same_layout": True} | values


def verdict(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], **amplified: float) -> dict[str, Any]:
    return judge(rows, resumed, AMPLIFIED | amplified)


def test_enough_layouts_that_agree_pass() -> None:
    rows = [
        row(step_loss=LIMIT, largest_difference=2e-12, float32_first_loss=FIRST_LOSS_LIMIT, float32_loss=0.5)
        for _ in range(ENOUGH)
    ]
    found = verdict(rows, [resume(), resume(same_layout=False, bitwise=False, step_update=1e-13)])
    assert found == {"passed": True, "largest_difference": 2e-12, "limit": LIMIT, **AMPLIFIED}


@pytest.mark.parametrize("part", STEP_COLUMNS)
@pytest.mark.parametrize("value", [1.1e-12, 1.0, math.inf, math.nan])
def test_a_layout_or_resume_that_differs_fails(part: str, value: float) -> None:
    good = [row() for _ in range(ENOUGH)]
    assert not verdict([*good, row(**{part: value})], [resume()])["passed"]
    assert not verdict(good, [resume(), resume(same_layout=False, bitwise=False, **{part: value})])["passed"]


def test_a_whole_run_over_which_rounding_grows_is_only_shown() -> None:
    assert verdict([row(loss=1e-3, weights=1.0, statistics=1e-9)] * ENOUGH, [resume()])["passed"]


@pytest.mark.parametrize("value", [2e-6, math.nan])
def test_a_first_float32_loss_that_differs_fails(value: float) -> None:
    assert not verdict([row()] * ENOUGH + [row(float32_first_loss=value)], [resume()])["passed"]


def test_a_first_float32_loss_may_differ_by_what_the_recipe_multiplies_rounding_by() -> None:
    rows = [row()] * ENOUGH + [row(float32_first_loss=2e-6)]
    assert verdict(rows, [resume()], first_loss_amplification=3.0)["passed"]


def test_a_resume_on_the_same_layout_must_be_bitwise() -> None:
    assert not verdict([row()] * ENOUGH, [resume(bitwise=False)])["passed"]


def test_too_few_layouts_prove_too_little() -> None:
    assert not verdict([row()] * (ENOUGH - 1), [resume()])["passed"]


def outcome(loss: float = 1.0, weight: float = 2.0, running: float = 3.0) -> Outcome:
    tensors = {"w": torch.tensor([weight, 1.0]), "norm.running_mean": torch.tensor([running])}
    return Outcome([loss, 5.0], tensors)


def test_differences_are_relative_to_the_largest_value_and_told_apart() -> None:
    assert compare_outcomes(outcome(), outcome()) == {"loss": 0, "weights": 0, "statistics": 0, "first_loss": 0}
    found = compare_outcomes(outcome(), outcome(loss=1.5, weight=2.5, running=3.3))
    assert found == pytest.approx({"loss": 0.1, "weights": 0.25, "statistics": 0.1, "first_loss": 0.5})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("key", "part"), [("loss", "loss"), ("weight", "weights"), ("running", "statistics")])
def test_what_is_not_finite_is_never_the_same(key: str, part: str, value: float) -> None:
    broken = outcome(**{key: value})
    for found in (compare_outcomes(outcome(), broken), compare_outcomes(broken, outcome())):
        assert not found[part] <= LIMIT
    if math.isnan(value):
        assert (
            not compare_outcomes(broken, outcome(**{key: value}))[part] <= LIMIT
        )  # two runs that both broke prove nothing


def test_what_is_zero_but_for_rounding_is_measured_beside_the_largest_of_its_kind() -> None:
    def trial(noise: float, small: float, mean: float) -> Outcome:
        values = {"a.weight": 2.0, "a.bias": noise, "a.weight.momentum": 1e-3, "a.bias.momentum": small}
        tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
        norm = {"b.running_mean": torch.tensor([mean]).double(), "b.running_var": torch.tensor([4.0]).double()}
        return Outcome([1.0], tensors | norm)

    one = trial(noise=1e-18, small=1e-12, mean=1e-15)
    assert compare_outcomes(one, trial(-1e-18, 1e-12, 1e-15))["weights"] == pytest.approx(1e-18)
    assert compare_outcomes(one, trial(1e-18, 3e-12, 1e-15))["weights"] == pytest.approx(
        2
    )  # small, and yet not rounding
    assert compare_outcomes(one, trial(1e-18, 1e-12, -1e-15))["statistics"] == pytest.approx(
        1e-15
    )  # beside a spread of 2
    assert compare_outcomes(one, trial(1e-18, 1e-12, 1.0))["statistics"] == pytest.approx(0.5)


def test_the_difference_of_zeros_is_zero() -> None:
    assert relative_difference(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_difference(torch.zeros(3), torch.ones(3)) > 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_agrees_with_nothing(value: float) -> None:
    odd, good = torch.tensor([1.0, value, 2.0]), torch.ones(3)
    for pair in ((odd, good), (good, odd), (odd, odd)):
        assert relative_difference(*pair) == math.inf


def test_a_smaller_batch_counts_as_large_where_that_is_asked_for() -> None:
    recipe = make_recipe("global_batch=64", "norm_batch=32")
    assert shrink(recipe)[0].global_batch == 64
    assert (shrink(recipe, above=32)[0].global_batch, shrink(recipe, above=32)[0].norm_batch) == (32, 16)


@pytest.mark.parametrize("name", shipped.names("recipes"))
def test_every_shipped_recipe_allows_enough_layouts(name: str) -> None:
    recipe, _ = shrink(build(Recipe, shipped.tree("recipes", name)))
    assert len(choose_layouts(recipe)) >= ENOUGH


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("norm_batch=16",),
        ("norm_batch=8",),
        ("global_batch=64", "norm_batch=16"),
        ("norm=group",),
        ("norm=none", "global_batch=2"),
        ("global_batch=1", "norm_batch=1"),
    ],
)
def test_every_layout_fits_and_no_two_are_the_same(words: tuple[str, ...]) -> None:
    recipe = make_recipe(*words)
    layouts = choose_layouts(recipe)
    norm_batch = (recipe.norm_batch or recipe.global_batch) if isinstance(recipe.norm, BatchNorm) else None
    assert layouts[0].replicas == 1
    assert layouts[0].micro_batch == recipe.global_batch
    assert len(set(layouts)) == len({replace(layout, label="") for layout in layouts}) == len(layouts)
    assert [layout.label for layout in layouts if layout.recompute] == ["recomputed"] * (recipe.global_batch != 2)
    for layout in layouts:
        assert fits(recipe.global_batch, norm_batch, layout.replicas, layout.micro_batch)


def test_layouts_are_of_every_kind() -> None:
    layouts = choose_layouts(make_recipe("global_batch=32", "norm_batch=8"))
    shapes = {(layout.replicas, layout.micro_batch) for layout in layouts if layout.stages == 1}
    assert shapes == {(1, 32), (1, 8), (1, 16), (2, 8), (3, 8), (2, 4), (4, 2), (4, 4)}
    assert [(layout.replicas, layout.micro_batch) for layout in layouts if layout.recompute == ("all",)] == [(1, 8)]
    assert [(layout.replicas, layout.micro_batch) for layout in layouts if layout.shard == "optimizer"] == [
        (2, 8), (2, 4),
    ]  # fmt: skip
    pipelines = [layout for layout in layouts if layout.stages == 2]
    assert [(layout.replicas, layout.micro_batch, layout.virtual_stages) for layout in pipelines] == [
        (1, 8, 2), (2, 4, 1),
    ]  # fmt: skip
    assert [layout.pipeline for layout in pipelines] == ["interleaved", "interleaved"]
    whole_step = choose_layouts(make_recipe("norm_batch=16"))
    assert [layout.pipeline for layout in whole_step if layout.stages == 2] == ["grouped", "grouped"]


@pytest.mark.parametrize("words", [("model=timm:resnet18",), ("freeze=stem",)], ids=str)
def test_a_network_in_one_block_or_with_frozen_ones_is_proved_without_pipelines(words: tuple[str, ...]) -> None:
    assert all(layout.stages == 1 for layout in choose_layouts(make_recipe(*words)))


@pytest.mark.parametrize(
    ("words", "batch", "norm_batch"),
    [
        (("global_batch=128", "norm_batch=32"), 128, 32),
        (("global_batch=256", "norm_batch=256"), 16, 16),
        (("global_batch=256", "norm_batch=null"), 16, 16),
        (("global_batch=1024", "norm_batch=32"), 32, 16),
        (("global_batch=360", "norm_batch=45"), 30, 15),
    ],
)
def test_a_large_recipe_is_shrunk_with_its_norm_groups_kept(
    words: tuple[str, ...], batch: int, norm_batch: int
) -> None:
    recipe, told = shrink(make_recipe(*words))
    assert (recipe.global_batch, recipe.norm_batch) == (batch, norm_batch)
    assert bool(told) == (batch < 128)


def test_large_made_up_images_are_shrunk() -> None:
    recipe, told = shrink(make_recipe("data.side=224", "data.name=synthetic"))
    assert isinstance(recipe.data, Made)
    assert (recipe.data.side, recipe.data.name) == (32, "generated")
    assert told == ["image side 224 -> 32"]


@pytest.mark.parametrize(("model", "side"), [("alexnet", 63), ("googlenet", 32), ("inception-v3", 299), ("timm:a", 32)])
def test_images_are_not_shrunk_below_what_the_network_takes(model: str, side: int) -> None:
    recipe, _ = shrink(make_recipe(f"model={model}", "data.side=320"))
    assert isinstance(recipe.data, Made)
    assert recipe.data.side == side
