"""The numbers of `bench`: when a speed is steady, which blocks count, percentiles, sums over replicas, verdicts."""

from __future__ import annotations

import pytest

from paceline.training import timing
from paceline.visible import long_time


@pytest.mark.parametrize(
    ("blocks", "start"),
    [
        ([], None),
        ([1.0, 1.0], None),
        ([1.0, 1.0, 1.0], 0),
        ([5.0, 2.0, 1.0, 1.01, 1.02], 2),
        ([1.0, 1.01, 1.021], None),
        ([1.02, 1.0, 1.01], 0),
        ([1.0, 1.1, 1.0, 1.1, 1.0, 1.1], None),
        ([1.0, 1.0, 9.0, 1.0, 1.0, 1.0], 3),
    ],
)
def test_a_speed_is_steady_once_three_blocks_in_a_row_agree_within_2_percent(
    blocks: list[float], start: int | None
) -> None:
    assert timing.steady_from(blocks) == start


def test_blocks_count_from_the_first_steady_one_on() -> None:
    blocks = [9.0, 5.0, *[1.0] * 7]
    assert not timing.is_measured(blocks, seconds=1000)
    assert timing.is_measured([*blocks, 1.0], seconds=1000)
    assert timing.first_counted([*blocks, 1.0]) == 2


def test_a_speed_that_is_never_steady_is_that_of_the_last_blocks() -> None:
    restless = [1.0, 2.0] * 15
    assert not timing.is_measured(restless[:-1], seconds=1000)
    assert timing.is_measured(restless, seconds=1000)
    assert timing.first_counted(restless) == 30 - timing.COUNTED
    assert timing.first_counted(restless[:4]) == 0


def test_the_time_that_is_given_ends_a_measurement_but_never_before_three_blocks() -> None:
    assert not timing.is_measured([60.0, 70.0], seconds=1)
    assert timing.is_measured([60.0, 70.0, 80.0], seconds=1)
    assert not timing.is_measured([0.1, 0.2, 0.3], seconds=1)


@pytest.mark.parametrize(("seconds", "steps"), [(0.05, 10), (0.5, 3), (20.0, 3), (1e-7, 1000), (0.0, 1000)])
def test_a_block_takes_half_a_second_if_its_steps_allow(seconds: float, steps: int) -> None:
    assert timing.block_steps(seconds) == steps


def test_long_steps_warm_up_less() -> None:
    assert (timing.warm_steps(0.1), timing.warm_steps(30.0)) == (8, 2)


def test_repeats_that_take_too_long_are_left_out_but_for_ten() -> None:
    assert timing.sample_count(100, 0.01, seconds=20) == 100
    assert timing.sample_count(100, 1.0, seconds=20) == 20
    assert timing.sample_count(100, 60.0, seconds=20) == 10
    assert timing.sample_count(3, 60.0, seconds=20) == 3


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (99, 99), (100, 100), (0, 1), (99.5, 100)])
def test_a_percentile_is_one_of_the_numbers(percent: float, value: float) -> None:
    assert timing.percentile([float(n) for n in range(100, 0, -1)], percent) == value


def test_percentiles_of_few_numbers_are_the_largest() -> None:
    assert [timing.percentile([3.0, 1.0, 2.0], percent) for percent in (50, 90, 99, 100)] == [2.0, 3.0, 3.0, 3.0]


def test_a_spread_has_the_median_the_quartiles_and_the_extremes() -> None:
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == timing.Spread(3.0, 1.0, 2.0, 4.0, 5.0)
    assert timing.spread([1.0, 2.0]).lower_quartile == 1.25
    assert timing.spread([7.0]) == timing.Spread(7.0, 7.0, 7.0, 7.0, 7.0)


def test_images_of_all_replicas_are_divided_by_the_time_of_the_slowest() -> None:
    images, seconds = [[100, 100], [50, 50]], [[1.0, 2.0], [1.5, 1.0]]
    assert timing.slowest(seconds) == [1.5, 2.0]
    assert timing.rates(images, seconds) == [100.0, 75.0]


def test_only_an_input_that_costs_speed_is_a_limit() -> None:
    assert timing.verdict(1000, 0.01, None) is None
    assert timing.verdict(990, 0.3, 1000) is None  # it waited while the device was still busy
    line = timing.verdict(400, 0.62, 1600)
    assert line is not None
    assert line.startswith(
        "the input is the limit: 62% of the time was spent waiting for images; 400 images/s, and 1,600"
    )
    assert "paceline bench data" in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (3599.9, "60 min 0 s"),
        (7380, "2 h 3 min"), (180_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_times_are_told_in_two_units(seconds: float, text: str) -> None:
    assert long_time(seconds) == text
