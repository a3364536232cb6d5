"""What is shown of a run: it fits, everything has its name, and curves show what happened."""

from __future__ import annotations

import pytest
from rich.text import Text

from paceline.sink.drawing import bar, clock, curves, fitted
from paceline.sink.panel import Doing, bars, has_times, numbers, pictures, problems, scale_of
from paceline.sink.status import Status
from record_rows import report_of, start_of, validation_of

NAMES = ("loss", "top-1", "lr", "images/s", "average", "waiting", "memory", "validation", "best")


def trained(*more: int) -> Status:
    """A run after some reports and a validation."""
    status = Status()
    for row in [start_of(), *(report_of(step) for step in (10, 20, *more)), validation_of(20, 0.8125)]:
        status.take(row, 100.0)
    return status


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_a_time_reads_as_a_clock() -> None:
    assert [clock(seconds) for seconds in (0.9, 3723, 360000, None, float("inf"))] == [
        "0:00:00",
        "1:02:03",
        "100:00:00",
        "-:--:--",
        "-:--:--",
    ]


def test_a_bar_is_full_at_the_end_only() -> None:
    assert [bar(8, share, 0.0).plain.count("━") for share in (0.0, 0.5, 0.999, 1.0, 1.5)] == [0, 4, 7, 8, 8]
    assert bar(8, 0.5, 0.0, ascii_only=True).plain == "====----"


def test_a_bar_of_unknown_length_moves() -> None:
    assert bar(8, None, 0.0).plain != bar(8, None, 0.5).plain
    assert bar(8, None, 0.5).plain.count("━") == 2


def test_bars_name_elapsed_and_left() -> None:
    doing = Doing("validating", 1000, 4000, began_at=98.0)
    epoch, steps, validating = plain(bars(trained(), doing, 104.0, 77))
    assert epoch.startswith("epoch 3 of 6              ─")
    assert epoch.endswith(" 0:00:04 elapsed  0:00:20 left")
    assert steps.startswith("step 20 of 60             ━━━━━━━")
    assert steps.endswith(" 0:00:44 elapsed  0:01:20 left")
    assert validating.startswith("validating 1,000 of 4,000 ━━━━━─")
    assert validating.endswith(" 0:00:06 elapsed  0:00:18 left")


@pytest.mark.parametrize("width", [77, 57, 40, 26, 18, 8, 1])
def test_everything_fits_its_width(width: int) -> None:
    status = trained(24)
    status.bad_steps = 3
    lines = [
        *bars(status, Doing("saving", 0, 0, 99.0), 104.0, width),
        *numbers(status, 104.0, width, times=True),
        *problems(status, width),
        *pictures(status, scale_of([status]), width, 9),
    ]
    assert {line.cell_len for line in lines} == {width}


@pytest.mark.parametrize(("width", "height"), [(77, 3), (57, 5), (40, 11), (18, 11)])
def test_every_number_is_named_at_every_width(width: int, height: int) -> None:
    lines = numbers(trained(), 104.0, width, times=True)
    text = "\n".join(plain(lines))
    assert len(lines) == height
    assert [name for name in NAMES if name not in text] == []
    values = ("1.6667", "20.00%", "0.1", "80", "25.0%", "3.0 GiB", "81.25%")
    assert [value for value in values if value not in text] == []
    assert ("elapsed" in text) is (width < 50)


def test_narrow_bars_leave_times_to_the_numbers() -> None:
    assert [has_times(bars(trained(), None, 104.0, width)) for width in (77, 57, 40, 18)] == [True, True, False, False]


def test_the_best_is_told_in_the_metric_of_the_run() -> None:
    status = Status()
    for row in [start_of(metric="loss"), report_of(10), validation_of(10, 0.75)]:
        status.take(row, 1.0)
    assert "best       loss 0.2500 at epoch 1" in "\n".join(plain(numbers(status, 1.0, 40)))


def test_what_nobody_knows_is_a_dash() -> None:
    status = Status()
    status.take(start_of(), 1.0)
    status.take(report_of(10, loss=None, memory=None), 1.0)
    text = plain(numbers(status, 1.0, 77))
    assert text[0].startswith("loss  -  ")
    assert text[2].rstrip().endswith("memory     -")


def test_a_curve_goes_from_corner_to_corner() -> None:
    lines = curves([("", [(0.0, 0.0), (10.0, 1.0)])], 8, 4, 10.0, (0.0, 1.0), ascii_only=True)
    assert plain(lines) == ["      **", "    **  ", "  **    ", "**      "]
    braille = plain(curves([("", [(0.0, 0.0), (10.0, 1.0)])], 2, 1, 10.0, (0.0, 1.0)))
    assert braille == ["⡠⠊"]


def test_curves_of_several_runs_share_their_scale() -> None:
    short, long = trained(), trained(30, 40)
    scale = scale_of([short, long])
    assert scale.most_x == 40
    assert scale.ranges["loss"] == pytest.approx((2 - 40 / 60, 2 - 10 / 60))
    first = plain(pictures(short, scale, 77, 5))[0]
    assert first.split() == ["loss", "1.33", "to", "1.83", "top-1", "10.0%", "to", "81.2%", "lr", "0.1", "to", "0.1"]
    drawn = "".join(plain(pictures(short, scale, 77, 5))[1:])
    assert len(drawn.replace(" ", "")) < len("".join(plain(pictures(long, scale, 77, 5))[1:]).replace(" ", ""))


@pytest.mark.parametrize(
    ("height", "names"), [(2, []), (3, ["loss"]), (6, ["loss", "top-1"]), (9, ["loss", "top-1", "lr"])]
)
def test_little_room_shows_the_first_curves(height: int, names: list[str]) -> None:
    status = trained()
    lines = plain(pictures(status, scale_of([status]), 30, height))
    assert [line.split()[0] for line in lines if line[0].isalpha()] == names
    assert len(lines) in (0, height)


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    status = Status()
    for row in [start_of(), report_of(10, loss=None), report_of(20, loss=None)]:
        status.take(row, 1.0)
    assert "loss" not in scale_of([status]).ranges
    assert plain(pictures(status, scale_of([status]), 77, 3))[0].startswith("loss  ")


def test_a_line_that_is_too_long_ends_in_dots() -> None:
    assert fitted(Text("a long name"), 7).plain == "a long…"
