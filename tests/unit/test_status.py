"""Where a run stands, by the rows of its record."""

from __future__ import annotations

import pytest

from paceline.record import Row
from paceline.sink.status import SILENT, STARTING, Status
from record_rows import report_of, start_of, validation_of


def status_of(*rows: Row, at: float = 100.0) -> Status:
    """What is known after these rows, of which each was written at the same time."""
    status = Status()
    for row in rows:
        status.take(row, at)
    return status


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([], "no record yet"),
        ([start_of()], "starting"),
        ([start_of(), report_of(10)], "training"),
        ([start_of(), report_of(10), {"kind": "validation-start", "step": 10, "epoch": 1.0}], "validating"),
        ([start_of(), report_of(10), validation_of(10, 0.5)], "training"),
        ([start_of(), report_of(60), validation_of(60, 0.5)], "finishing"),
        ([start_of(), report_of(10), {"kind": "stop", "step": 10, "reason": "target"}], "finishing"),
        ([start_of(), {"kind": "interrupted", "step": 3, "why": "signal"}], "interrupted"),
        ([start_of(), {"kind": "failed", "why": "no space"}], "failed"),
        ([start_of(), report_of(60), {"kind": "end", "step": 60}], "ended"),
        ([start_of(), report_of(60), {"kind": "end", "step": 60}, validation_of(30, 0.5)], "ended"),
    ],
)
def test_rows_tell_what_a_run_is_doing(rows: list[Row], phase: str) -> None:
    assert status_of(*rows).phase == phase


def test_time_passes_between_reports_and_stands_still_at_the_end() -> None:
    status = status_of(start_of(), report_of(10))
    assert (status.elapsed(103.0), status.left()) == (23.0, 100.0)
    status.take({"kind": "validation-start", "step": 10, "epoch": 1.0}, 104.0)
    assert status.elapsed(105.0) == 25.0
    status.take({"kind": "end", "step": 60}, 106.0)
    assert status.elapsed(500.0) == 26.0


def test_the_time_left_includes_validations_and_leaves_out_how_a_start_warms_up() -> None:
    slow = report_of(10, total_seconds=100.0)
    assert status_of(start_of(), slow).left() == 500
    assert status_of(start_of(), slow, report_of(20, total_seconds=130.0)).left() == 120
    assert status_of(start_of()).left() is None


def test_an_epoch_knows_where_it_begins_and_when_it_began() -> None:
    status = status_of(start_of(), report_of(10), report_of(20), report_of(24))
    assert status.epoch_steps() == (3, 20, 30)
    assert status.seconds_at(20) == 40
    assert status.seconds_at(15) == 30
    assert status_of(start_of(), report_of(60)).epoch_steps() == (6, 50, 60)
    assert status_of(start_of(steps=15, epochs=1.5), report_of(12)).epoch_steps() == (2, 10, 15)


def test_the_average_speed_is_of_images_and_leaves_out_the_first_report_of_a_start() -> None:
    first, fast, slow = (report_of(step, images_per_second=speed) for step, speed in ((4, 1.0), (8, 100.0), (12, 50.0)))
    assert status_of(start_of(), first).speed == 1
    assert status_of(start_of(), first, fast).speed == 100
    assert status_of(start_of(), first, fast, slow).speed == pytest.approx(320 / (1.6 + 3.2))
    assert status_of(start_of(), first, fast, start_of(8), first | {"step": 12}).speed == 100


def test_a_killed_run_that_is_resumed_forgets_what_it_trains_again() -> None:
    status = status_of(start_of(), report_of(10), report_of(20), report_of(30), start_of(20))
    assert (status.phase, status.step, [point.step for point in status.points]) == ("starting", 20, [10, 20])
    assert [event.text for event in status.events] == ["killed after step 30, resumed at step 20"]
    assert status.elapsed(100.0) == 40
    status.take(report_of(30, total_seconds=70.0), 110.0)
    assert [point.step for point in status.points] == [10, 20, 30]
    assert status.left() == 90  # at the pace of this start


def test_a_run_that_was_interrupted_is_not_called_killed() -> None:
    status = status_of(start_of(), {"kind": "interrupted", "step": 3, "why": "signal"}, start_of(3))
    assert [event.text for event in status.events] == [
        "interrupted by a signal after step 3, saved",
        "resumed at step 3",
    ]


@pytest.mark.parametrize(("metric", "best"), [("top1", 20), ("loss", 30)])
def test_the_best_validation_is_that_of_the_metric_and_of_all_images(metric: str, best: int) -> None:
    rows = [
        validation_of(10, 0.99, partial=True, loss=0.0),
        validation_of(20, 0.75, loss=0.5),
        validation_of(30, 0.5, loss=0.25),
    ]
    status = status_of(start_of(metric=metric), *rows, validation_of(40, 0.99, partial=True, loss=None))
    assert status.best
    assert status.last
    assert (status.best["step"], status.last["step"]) == (best, 40)
    assert [step for step, _ in status.validations] == [10, 20, 30, 40]


def test_faults_are_told_once_in_one_line() -> None:
    status = status_of(
        start_of(arithmetic_changed={"precision": ["fp32", "bf16"]}),
        report_of(10, bad_steps=2),
        report_of(20, bad_steps=2),
        {"kind": "note", "text": "training waits\nfor \x1b[31mimages", "warning": True},
        {"kind": "note", "text": "harmless", "warning": False},
        {"kind": "average", "step": 60, "top1": 0.75, "steps": [40, 50, 60]},
        {"kind": "failed", "why": "disk full"},
    )
    assert [event.text for event in status.events] == [
        "on.precision was fp32 and is bf16: rounding changes from here on",
        "2 bad steps by step 10",
        "training waits\\nfor \\x1b[31mimages",
        "top-1 75.00% of the mean of 3 checkpoints",
        "failed: disk full",
    ]


def test_a_run_is_silent_when_its_rows_stay_away_much_longer_than_usual() -> None:
    status = status_of(start_of(), report_of(10), report_of(20))
    assert status.silence(100 + SILENT) is None  # reports come every 20 seconds
    assert status.silence(100 + 100.5) == 100.5
    status.take(start_of(20), 300.0)
    assert status.silence(300 + STARTING - 1) is None
    assert status.silence(300 + STARTING) == STARTING
    status.take({"kind": "end", "step": 60}, 300.0)
    assert status.silence(9e9) is None


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "report", "step": 30, "loss": "low"},
        {"kind": 7},
        {"kind": "validation", "step": -1},
        {"kind": "start", "step": "x"},
        {"kind": "average", "step": 60},
        {"kind": "unheard of"},
        report_of(20, loss=float("inf")),
        report_of(20, lr=float("nan")),
        report_of(20, total_seconds=10**400),
    ],
)
def test_a_damaged_row_changes_nothing(row: Row) -> None:
    status = status_of(start_of(), report_of(10), row)
    assert (status.phase, status.step, len(status.points), status.events) == ("training", 10, 1, [])


def test_a_record_of_an_earlier_version_lacks_the_length() -> None:
    status = status_of({"kind": "start", "step": 0, "arithmetic_changed": {}}, report_of(10))
    assert (status.steps, status.epoch, status.left()) == (0, 1.0, None)
