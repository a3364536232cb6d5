"""Durations are exact, and a rhythm is what counting images one step at a time gives."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.settings.duration import Duration, Rate, Rhythm

SETTINGS = settings(deadline=None, max_examples=200, derandomize=True)

AMOUNTS = st.one_of(
    st.fractions(0, 10**6),
    st.decimals(0, 10**6, places=6).map(Fraction),
    st.integers(0, 10**30).map(Fraction),
    st.integers(1, 10**30).map(lambda n: Fraction(1, n)),
)


@SETTINGS
@given(amount=AMOUNTS, unit=st.sampled_from(["epochs", "steps", "images", "%", "seconds"]))
def test_a_duration_survives_being_written_and_read(amount: Fraction, unit: str) -> None:
    duration = Duration(amount, unit)
    assert Duration.parse(str(duration)) == duration


@SETTINGS
@given(
    every=st.fractions(Fraction(1, 7), 60, max_denominator=7),
    offset=st.one_of(st.just(Fraction(0)), st.fractions(0, 90, max_denominator=7)),
    batch=st.integers(1, 40),
)
def test_something_is_due_at_the_first_step_that_has_seen_its_images(
    every: Fraction, offset: Fraction, batch: int
) -> None:
    rhythm = Rhythm.of(every, offset, batch)
    mark = offset or every  # the next number of images that it waits for
    for step in range(1, 60):
        reached = mark <= step * batch
        assert rhythm.due(step) == reached
        while mark <= step * batch:
            mark += every


@SETTINGS
@given(
    images=st.integers(1, 500),
    batch=st.integers(1, 600),
    epochs=st.integers(1, 5),
    steps=st.integers(1, 2000),
)
def test_every_k_epochs_is_the_first_step_at_which_k_times_n_images_were_seen(
    images: int, batch: int, epochs: int, steps: int
) -> None:
    every = Duration(Fraction(epochs), "epochs").images(images, batch, steps)
    rhythm = Rhythm.of(every, Fraction(0), batch)
    due = [step for step in range(1, 100) if rhythm.due(step)]
    firsts = {-(-k * epochs * images // batch) for k in range(1, 100 * batch // (epochs * images) + 2)}
    assert due == sorted(step for step in firsts if step < 100)


@SETTINGS
@given(value=st.floats(0, 1e12), batch=st.integers(1, 10**6), images=st.integers(1, 10**6))
def test_a_rate_per_images_is_that_rate_at_that_many_images(value: float, batch: int, images: int) -> None:
    assert Rate.parse(value).at(batch) == value
    per = Rate.parse(f"{value:f} per {images} images")
    assert per.at(images) == pytest.approx(float(f"{value:f}"), rel=1e-15)
    assert per.at(2 * batch) == 2 * per.at(batch)
