"""Which validation ends a run: by patience, at a target, and by which number."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from conftest import make_plan, make_recipe
from paceline.errors import PlanError, SpecError
from paceline.settings.read import dump
from paceline.training.stopping import Stopping


def ends(values: list[float], *words: str) -> tuple[int, str | None]:
    """How many validations with these values a run has, and what ends it."""
    stop, stopping = make_recipe(*words).stop, Stopping()
    for step, value in enumerate(values, 1):
        stopping.judge(stop, step, value)
        if stopping.reason:
            return step, stopping.reason
    return len(values), None


@pytest.mark.parametrize(
    ("values", "words", "end"),
    [
        ([0.5, 0.4, 0.4, 0.4], (), (4, None)),
        ([0.5, 0.4, 0.5, 0.6, 0.6, 0.1, 0.9], ("stop.patience=2 validations",), (3, "patience")),
        ([0.5, 0.4, 0.6, 0.6, 0.1, 0.9], ("stop.patience=2 validations",), (5, "patience")),
        ([0.5, 0.4], ("stop.patience=1 validation",), (2, "patience")),
        ([0.1, 0.758, 0.759, 0.8], ("stop.target=75.9%",), (3, "target")),
        ([0.1, 0.2, 0.3], ("stop.target=0.3",), (3, "target")),
        ([2.0, 1.0, 1.5, 0.5], ("stop.patience=1 validations", "stop.metric=loss"), (3, "patience")),
        ([2.0, 1.0, 0.5], ("stop.target=1.0", "stop.metric=loss"), (2, "target")),
        ([2.0, math.nan, math.nan, 1.0], ("stop.patience=2 validations", "stop.metric=loss"), (3, "patience")),
        ([math.nan, 2.0, 3.0], ("stop.patience=2 validations", "stop.metric=loss"), (3, None)),
    ],
)
def test_a_run_ends_with_the_validation_that_decides_it(
    values: list[float], words: tuple[str, ...], end: tuple[int, str | None]
) -> None:
    assert ends(values, *words) == end


def test_the_best_validation_is_known() -> None:
    stop, stopping = make_recipe("stop.patience=9 validations").stop, Stopping()
    for step, value in ((10, 0.3), (20, 0.7), (30, 0.7), (40, 0.1)):
        stopping.judge(stop, step, value)
    expected = {"validated": 40, "best": 0.7, "best_step": 20, "no_better": 2, "reason": None}
    assert asdict(stopping) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stop.patience=5", "expected a number of validations, such as '5 validations'"),
        ("stop.patience=5 epochs", "expected a number of validations, such as '5 validations'"),
        ("stop.patience=0 validations", "expected a number of validations, such as '5 validations'"),
        ("stop.target=75.9", "no accuracy is above 1; write 75.9%"),
        ("stop.target=many%", "expected a fraction such as 10% or 0.1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(word: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_recipe(word)


def test_a_written_recipe_keeps_the_unit_of_patience() -> None:
    recipe = make_recipe("stop.patience=5 validations", "stop.target=75.9%")
    assert "patience: 5 validations" in dump(recipe)
    assert make_recipe(text=dump(recipe)) == recipe


def test_the_last_checkpoints_of_a_run_that_may_end_early_are_not_averaged() -> None:
    with pytest.raises(PlanError, match=r"stop may end it before.*ema\.decay"):
        make_plan("average.last=2", "average.every=1 steps", "stop.target=90%")
