"""Trackers: the numbers of rows under the same keys, each step once, and never at the cost of the training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Paceline, make_plan, validation_row
from paceline.errors import SpecError
from paceline.histogram import Histogram, write_histograms
from paceline.record import Row, Run
from paceline.sink import TRACKERS, check_sinks, tracking
from paceline.sink.tracked import TrackedRow, tracked, tracked_settings
from paceline.sink.tracking import TrackingSink


class Remembers:
    """A tracker that remembers what it gets."""

    def __init__(self, last: dict[str, int] | None = None) -> None:
        self.last, self.rows, self.ended = last or {}, list[TrackedRow](), ""

    def last_steps(self) -> dict[str, int]:
        return dict(self.last)

    def send(self, row: TrackedRow) -> None:
        self.rows.append(row)

    def close(self, kind: str) -> None:
        self.ended = kind

    @property
    def steps(self) -> list[tuple[str, int]]:
        return [(row.section, row.step) for row in self.rows]


class Hangs(Remembers):
    """A tracker that answers nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def send(self, row: TrackedRow) -> None:
        self.go.wait()


class Breaks(Remembers):
    """A tracker that raises at its third row."""

    def send(self, row: TrackedRow) -> None:
        super().send(row)
        if len(self.rows) == 3:
            raise ConnectionError("no route\nto host")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path / "run", "own") as run:
        yield run


def report(step: int) -> Row:
    row = {"step": step, "epoch": step / 6, "loss": 1 / (step + 1), "top1": 0.5, "lr": 0.1, "images_per_second": 9.0}
    return row | {"last_loss": 1.0, "last_top1": 0.5, "bad_steps": 0, "step_seconds": 1.0, "total_seconds": 1.0}


def track(run: Run, tracker: Remembers) -> None:
    run.sinks = [TrackingSink("mine", lambda _plan, _folder: tracker, make_plan(), run)]


def notes(run: Run) -> list[str]:
    return [row["text"] for row in run.rows() if row["kind"] == "note"]


def test_the_numbers_of_a_row_have_the_name_of_their_section() -> None:
    row = {"kind": "report", **report(3), "loss": math.nan, "why": "text", "flag": True, "list": [1]}
    (numbers,) = tracked(row, Path("no run"))
    assert (numbers.section, numbers.step) == ("training", 3)
    assert set(numbers.numbers) == {f"training/{key}" for key in report(3)} - {"training/step", "training/loss"}


def test_histograms_have_the_name_of_their_group_and_parameter(tmp_path: Path) -> None:
    whole, nothing = Histogram(0.0, 2.0, [3, 1], 0), Histogram(None, None, [0, 0], 4)
    groups = {"weights": {"stem.conv.weight": whole}, "gradients": {"stem.conv.weight": nothing}}
    file = write_histograms(tmp_path, 6, groups)
    row = {"kind": "histograms", "step": 6, "epoch": 1.0, "file": file}
    weights, gradients = tracked(row, tmp_path)
    assert (weights.section, weights.step, gradients.section) == ("weights", 6, "gradients")
    assert weights.histograms == {"weights/stem.conv.weight": whole}
    assert whole.edges == [0.0, 1.0, 2.0]
    assert gradients.histograms == {}  # there is nothing to draw


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"weights": {"a": {"low": 1}}}', b'{"weights": 7}'])
def test_histograms_that_somebody_has_removed_are_left_out(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert tracked({"kind": "histograms", "step": 6, "epoch": 1.0, "file": "a.json"}, tmp_path) == []


def test_settings_have_the_addresses_of_a_command() -> None:
    settings = tracked_settings(make_plan("optimizer.lr=0.25", "on.micro_batch=8"))
    assert (settings["optimizer.lr"], settings["on.micro_batch"], settings["init.from"]) == ("0.25", "8", "null")
    assert settings["on.sinks"] == "[console, csv, log, report]"


def test_a_resumed_run_sends_what_is_missing_and_nothing_twice(run: Run) -> None:
    run.write("start", step=0)
    for step in range(1, 7):
        run.write("report", **report(step))
    run.write(**validation_row(4, 0.5))
    tracker = Remembers({"training": 3})  # killed before the rest was sent
    track(run, tracker)
    run.write("start", step=4)
    run.write(**validation_row(4, 0.5))  # of a validation that a kill had come too early for
    for step in range(5, 9):
        run.write("report", **report(step))
    run.write("end", step=8)
    assert sorted(tracker.steps) == [*(("training", step) for step in range(4, 9)), ("validation", 4)]
    assert tracker.ended == "end"
    assert notes(run) == []


def test_steps_that_are_trained_again_are_not_sent_again(run: Run) -> None:
    tracker = Remembers({"training": 6})
    track(run, tracker)
    run.write("start", step=4)
    for step in range(5, 9):
        run.write("report", **report(step))
    run.write("end", step=8)
    assert tracker.steps == [("training", 7), ("training", 8)]


def test_a_tracker_that_hangs_costs_no_time_and_is_named_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MOST_ROWS", 50)
    monkeypatch.setattr(tracking, "WAITS", {"end": 0.05})
    tracker = Hangs()
    track(run, tracker)
    run.write("start", step=0)
    sink = run.sinks[0]
    start = time.perf_counter()
    for step in range(1, 201):
        sink.row({"kind": "report", **report(step)})
    assert time.perf_counter() - start < 0.2, "a row takes a millisecond at most"
    run.write("end", step=200)
    assert len(notes(run)) == 1
    assert notes(run)[0].startswith("mine did not finish in time and lacks ")
    assert notes(run)[0].endswith("rows; record.jsonl has them all")
    assert 199 <= int(notes(run)[0].split()[-6]) <= 200
    tracker.go.set()


def test_a_tracker_that_raises_is_off_with_one_note(run: Run) -> None:
    tracker = Breaks()
    track(run, tracker)
    run.write("start", step=0)
    for step in range(1, 9):
        run.write("report", **report(step))
    run.write("end", step=8)
    assert tracker.steps == [("training", step) for step in (1, 2, 3)]
    assert notes(run) == ["mine is off until the next start: ConnectionError: no route"]


def test_a_command_beside_the_training_opens_no_tracker(run: Run) -> None:
    tracker = Remembers()
    track(run, tracker)
    run.write(**validation_row(4, 0.5))
    assert tracker.steps == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_has_its_install_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sink.find_spec", lambda _name: None)
    placement = make_plan(f"on.sinks=[csv, {name}]").placement
    with pytest.raises(SpecError) as caught:
        check_sinks(placement)
    assert f"pip install 'paceline[{name}]'" in str(caught.value)


def test_a_tracker_that_is_not_installed_is_refused_before_torch_is_loaded(paceline: Paceline) -> None:
    hidden = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'wandb' else find(name, *rest)\n"
        "from paceline.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = paceline("train", "on.sinks=[console, wandb]", "--out", "run", program=hidden)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == (
        "error: on.sinks: wandb is not installed; write pip install 'paceline[wandb]', or leave wandb out\n"
    )
