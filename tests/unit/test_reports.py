"""The rows that reports make of the sums of a state."""

from __future__ import annotations

import pytest
import torch

from conftest import make_plan
from paceline.record import Row
from paceline.training import reports
from paceline.training.reports import Clock, run_speed
from paceline.training.state import build_state
from paceline.world import World


def rows(*speeds: float | None) -> list[Row]:
    """A record with reports of these speeds; None is a start."""
    rest = dict.fromkeys(
        ("epoch", "last_top1", "top1", "step_seconds", "total_seconds", "lr", "last_loss", "loss"), 1.0
    )
    return [
        {"kind": "start", "step": 0}
        if speed is None
        else {"kind": "report", "step": number, "bad_steps": 0, "images_per_second": speed, **rest}
        for number, speed in enumerate(speeds)
    ]


def test_the_speed_of_a_run_is_the_median_of_its_reports_without_the_first_of_each_start() -> None:
    speed = run_speed(rows(None, 1.0, 100.0, 102.0, None, 2.0, 104.0))
    assert speed["images_per_second"] == 102
    assert (speed["images_per_second_spread"]["least"], speed["images_per_second_spread"]["most"]) == (100, 104)


def test_a_run_of_one_report_has_the_speed_of_that() -> None:
    assert run_speed(rows(None, 7.0))["images_per_second"] == 7
    assert run_speed([]) == {}


@pytest.mark.parametrize("names", [("loss", "hits"), ("hits", "loss")])
def test_a_report_reads_sums_by_their_names(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    state = build_state(plan, World(torch.device("cpu")))
    state.step = 2
    sums, last_sums = {"loss": 48.0, "hits": 8.0}, {"loss": 8.0, "hits": 2.0}
    monkeypatch.setattr(reports, "TRAIN_SUMS", names)
    state.sums.copy_(torch.tensor([sums[name] for name in names]))
    state.last_sums.copy_(torch.tensor([last_sums[name] for name in names]))
    row = Clock(plan, [], 0).report(state, torch.tensor(0.5, dtype=torch.float64))
    assert (row["loss"], row["top1"], row["last_loss"], row["last_top1"]) == (1.5, 0.25, 0.5, 0.125)
    assert not state.sums.any()
    assert row["memory"] > 1 << 20  # what this process has taken
