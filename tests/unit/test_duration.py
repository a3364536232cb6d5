"""Lengths of training, learning rates that grow with the batch, and the rhythm of what comes back."""

from __future__ import annotations

from fractions import Fraction

import pytest

from conftest import make_plan, make_recipe
from paceline.errors import PlanError
from paceline.settings.duration import Duration, Rate, Rhythm
from paceline.settings.read import dump, parse


@pytest.mark.parametrize(
    ("text", "amount", "unit", "written"),
    [
        ("5 epochs", Fraction(5), "epochs", "5 epochs"),
        ("1 epoch", Fraction(1), "epochs", "1 epoch"),
        ("0.1 epochs", Fraction(1, 10), "epochs", "0.1 epochs"),
        ("1/16 epochs", Fraction(1, 16), "epochs", "0.0625 epochs"),
        ("1/3 epochs", Fraction(1, 3), "epochs", "1/3 epochs"),
        ("500 steps", Fraction(500), "steps", "500 steps"),
        ("1step", Fraction(1), "steps", "1 step"),
        ("1000 images", Fraction(1000), "images", "1000 images"),
        ("1 image", Fraction(1), "images", "1 image"),
        ("2%", Fraction(2), "%", "2%"),
        (" 12.5 % ", Fraction(25, 2), "%", "12.5%"),
        (".5 %", Fraction(1, 2), "%", "0.5%"),
        ("90 seconds", Fraction(90), "seconds", "90 seconds"),
        ("1 second", Fraction(1), "seconds", "1 second"),
        ("10 minutes", Fraction(600), "seconds", "600 seconds"),
        ("1.5 hours", Fraction(5400), "seconds", "5400 seconds"),
    ],
)
def test_every_unit_is_read_exactly_and_written_back(text: str, amount: Fraction, unit: str, written: str) -> None:
    duration = Duration.parse(text)
    assert (duration.amount, duration.unit, str(duration)) == (amount, unit, written)
    assert Duration.parse(written) == duration


@pytest.mark.parametrize("text", ["", "epochs", "5", "-1 epochs", "5 epoch s", "5 days", "1e3 steps", "5%%", "five %"])
def test_text_without_amount_and_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an amount with its unit"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("given", "hint"), [(5, "such as '5 epochs'"), (0.5, "such as '0.5 epochs'"), (0, "such as '1 epoch'")]
)
def test_a_bare_number_is_told_the_unit_it_lacks(given: float, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        Duration.parse(given)


@pytest.mark.parametrize("given", [True, None, [1], {}])
def test_what_is_no_amount_at_all_gets_no_hint(given: object) -> None:
    with pytest.raises(ValueError, match=r"seconds\)$"):
        Duration.parse(given)


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("2 epochs", 200),
        ("1/3 epochs", Fraction(100, 3)),
        ("3 steps", 48),
        ("7 images", 7),
        ("50%", 12 * 16 / 2),
    ],
)
def test_a_duration_is_a_number_of_images(text: str, images: Fraction | int) -> None:
    assert Duration.parse(text).images(epoch_images=100, global_batch=16, steps=12) == images


def test_every_4_epochs_with_offset_3_comes_after_epochs_3_7_and_11() -> None:
    plan = make_plan("epochs=12", "data.images=100", "evaluate.every=4 epochs", "evaluate.offset=3 epochs")
    rhythm = plan.validations
    assert rhythm is not None
    due = [step for step in range(plan.steps + 1) if rhythm.due(step)]
    assert due == [19, 44, 69]  # the first steps after which 300, 700 and 1100 images were seen


def test_nothing_is_due_before_the_first_step() -> None:
    rhythm = Rhythm.of(Fraction(1), Fraction(0), 16)
    assert not rhythm.due(0)
    assert [rhythm.due(step) for step in (1, 2, 3)] == [True, True, True]


def test_a_rhythm_stays_exact_over_a_very_long_run() -> None:
    rhythm = Rhythm.of(Fraction(1281167), Fraction(0), 3)
    far = 10**12
    step = -(-far * 1281167 // 3)
    assert rhythm.due(step)
    assert not rhythm.due(step - 1)
    assert not rhythm.due(step + 1)


@pytest.mark.parametrize(
    ("text", "batch", "rate"),
    [
        (0.1, 256, 0.1),
        (0, 256, 0.0),
        (3, 256, 3.0),
        ("2^-6 per image", 256, 4.0),
        ("2^-6.5 per image", 64, 2**-0.5),
        ("0.001 per image", 100, 0.1),
        ("0.256 per 256 images", 1024, 1.024),
        (" 1e-3 per 8 images ", 64, 0.008),
    ],
)
def test_a_rate_is_absolute_or_grows_with_the_global_batch(text: object, batch: int, rate: float) -> None:
    assert Rate.parse(text).at(batch) == pytest.approx(rate, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["fast", "0.1", "2^-6", "0.1 per", "-1 per image", "0.1 per -3 images", True, None, []]
)
def test_text_that_is_no_rate_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a learning rate such as"):
        Rate.parse(text)


@pytest.mark.parametrize("number", [-0.1, float("inf"), float("nan")])
def test_a_rate_below_zero_or_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="expected a learning rate of at least 0"):
        Rate.parse(number)


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [("2", 12), ("2 epochs", 12), ("500 steps", 500), ("1 step", 1), ("100 images", 6), ("1/7 epochs", 1), ("0.1", 1)],
)
def test_the_length_of_a_run_is_a_number_of_epochs_or_any_amount(epochs: str, steps: int) -> None:
    plan = make_plan(f"epochs={epochs}")
    assert plan.steps == steps
    assert parse(dump(plan.recipe), "plan").values["epochs"] == plan.recipe.model_dump()["epochs"]


def test_epochs_with_and_without_their_unit_are_the_same_recipe() -> None:
    assert make_recipe("epochs=2.5 epochs") == make_recipe("epochs=2.5")
    assert make_recipe("epochs=1/3 epochs") != make_recipe(f"epochs={1 / 3}")


def test_checkpoints_come_after_their_offset() -> None:
    plan = make_plan("epochs=6", "on.save=2 epochs", "on.save_offset=1 epoch")
    assert plan.saves is not None
    assert [step for step in range(plan.steps + 1) if plan.saves.due(step)] == [6, 18, 30]


def test_what_the_clock_decides_has_no_rhythm_of_steps() -> None:
    plan = make_plan("report=10 seconds", "on.save=1 hour")
    assert (plan.reports, plan.saves) == (None, None)
    with pytest.raises(PlanError, match=r"on\.save_offset is for saving by training"):
        make_plan("on.save=1 hour", "on.save_offset=1 epoch")
