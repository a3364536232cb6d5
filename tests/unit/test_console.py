"""What a person sees of a run: at its start, in a long validation, and at its end."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from conftest import make_plan, make_session, validation_row
from paceline import checkpoint
from paceline.planning import Plan
from paceline.record import Row, Run
from paceline.sink.console import ConsoleSink
from paceline.training.loop import train
from record_rows import report_of, start_of

START: Row = start_of(steps=6, epochs=1.0, parameters=74_900, arithmetic_changed={})


def trained(plan: Plan, folder: Path) -> Run:
    """The folder of a run that has come to its end."""
    session = make_session(plan, folder, "own")
    assert train(session)
    session.run.close()
    return session.run


def shown(plan: Plan, run: Run, *rows: Row) -> str:
    """What a terminal without colors shows of rows."""
    out = io.StringIO()
    sink = ConsoleSink(plan, run, Console(file=out, width=200))
    for row in rows:
        sink.row(row)
    return out.getvalue()


def test_a_long_validation_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("data.validation_images=1234")
    now = [100.0]
    monkeypatch.setattr("paceline.sink.console.time.monotonic", lambda: now[0])
    out = io.StringIO()
    sink = ConsoleSink(plan, Run(tmp_path, "read"), Console(file=out))
    for images in (100, 200, 300, 400):
        now[0] += 4
        sink.progress("validation", images, 1234)
    assert out.getvalue().splitlines() == ["validation: 300 of 1,234 images"]


def test_a_run_says_what_it_trains_and_what_came_out(tmp_path: Path) -> None:
    plan = make_plan("data.classes=4")
    run = trained(plan, tmp_path / "a run")
    text = shown(plan, run, START, {"kind": "end", "step": plan.steps})
    assert text.startswith("resnet8 (74,900 parameters) on generated: 96 images of 4 classes, for 6 steps of 16, fp32")
    assert "top-1" in text
    assert "top-5" not in text  # of four classes the right one is always among five
    assert f"Next: paceline validate '{run.folder}' --details\n" in text
    assert "cifar10" not in text


def test_a_better_checkpoint_than_the_last_is_named(tmp_path: Path) -> None:
    plan = make_plan()
    run = trained(plan, tmp_path / "a run")
    last = [row for row in run.rows() if row["kind"] == "validation"][-1]
    checkpoint.write(run.checkpoints, 3, {})
    run.write(**{**last, "step": 3, "top1": 0.99})
    text = shown(plan, run, {"kind": "end", "step": plan.steps})
    assert f"The best checkpoint: 99.00% after step 3: paceline validate '{run.folder}' --checkpoint best" in text


def test_the_best_checkpoint_is_that_of_the_metric_that_ends_runs(tmp_path: Path) -> None:
    plan = make_plan("stop.metric=loss")
    run = trained(plan, tmp_path / "run")
    last = [row for row in run.rows() if row["kind"] == "validation"][-1]
    checkpoint.write(run.checkpoints, 3, {})
    run.write(**{**last, "step": 3, "top1": 0.0, "loss": 0.125})
    assert "The best checkpoint: loss 0.1250 after step 3: " in shown(plan, run, {"kind": "end", "step": plan.steps})


def test_the_end_says_how_fast_the_run_was_and_counts_in_words(tmp_path: Path) -> None:
    plan = make_plan()
    run = trained(plan, tmp_path / "a run")
    spread = {"lower_quartile": 1900.0, "upper_quartile": 2100.4}
    end = {"kind": "end", "step": plan.steps, "images_per_second": 2000.0, "images_per_second_spread": spread}
    text = shown(plan, run, end)
    assert "2,000 images/s (half of the reports between 1,900 and 2,100)." in text
    assert "of 37 validation images after 1 epoch in " in text


def test_a_plain_report_has_the_learning_rate_and_the_time_left(tmp_path: Path) -> None:
    row = {
        "kind": "report", "step": 4, "epoch": 0.67, "lr": 0.1, "loss": 2.0, "top1": 0.25, "images_per_second": 64.0,
        "bad_steps": 1, "step_seconds": 100.0,
    }  # fmt: skip
    line = "step {}/6  epoch 0.67  lr 0.1  loss 2.0000  top-1 25.00%  64 images/s  1 bad step{}\n"
    assert shown(make_plan(), Run(tmp_path, "read"), row) == line.format(4, "  3 min 20 s left")
    assert shown(make_plan(), Run(tmp_path, "read"), row | {"step": 6}) == line.format(6, "")
    assert "  0.42 images/s  " in shown(make_plan(), Run(tmp_path, "read"), row | {"images_per_second": 0.42})


def test_a_signal_is_answered_with_what_happens_next(tmp_path: Path) -> None:
    out = io.StringIO()
    sink = ConsoleSink(make_plan(), Run(tmp_path, "read"), Console(file=out, width=80))
    sink.progress("training", 20, 60)
    sink.progress("stopping", 0, 1)
    sink.row({"kind": "validation-start", "step": 20, "epoch": 1.0})
    sink.progress("stopping", 0, 1)
    assert out.getvalue().splitlines() == [
        "finishing step 21, then saving; press again to stop without",
        "leaving the validation, then saving; press again to stop without",
    ]


def test_unequal_classes_are_told_below_a_validation(tmp_path: Path) -> None:
    row = validation_row(6, 0.8333) | {"balanced_accuracy": 0.25}
    equal = shown(make_plan(), Run(tmp_path, "read"), row)
    unequal = shown(make_plan(), Run(tmp_path, "read"), row | {"majority": 0.8333})
    assert "unequal" not in equal
    assert unequal == f"{equal}  unequal classes: balanced accuracy 25.00%; the largest is 83.33% of the images\n"
    assert max(map(len, unequal.splitlines())) <= 80


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"reason": "target", "metric": "top1", "target": 0.759}, "the target of 75.90% top-1 is reached"),
        ({"reason": "target", "metric": "loss", "target": 0.5}, "the target of 0.5000 loss is reached"),
        (
            {"reason": "patience", "metric": "loss", "no_better": 1, "best": 1.5, "best_step": 3},
            "1 validation in a row had no better loss than 1.5000 after step 3",
        ),
        (
            {"reason": "patience", "metric": "loss", "no_better": 2, "best": None, "best_step": 0},
            "2 validations in a row had no finite loss",
        ),
    ],
)
def test_a_run_that_ends_early_says_why(tmp_path: Path, row: Row, text: str) -> None:
    said = shown(make_plan(), Run(tmp_path, "read"), {"kind": "stop", "step": 5, **row})
    assert said == f"Ended after step 5 of 6: {text}\n"


def test_a_bar_leaves_room_for_the_sign_of_an_interrupt_and_nothing_behind(tmp_path: Path) -> None:
    out = io.StringIO()
    sink = ConsoleSink(make_plan(), Run(tmp_path, "read"), Console(file=out, width=60, force_terminal=True))
    sink.row(START)
    sink.row({"kind": "interrupted", "step": 3, "why": "signal"})
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    bars = [line for line in lines if line.startswith("step ")]
    assert {len(line) for line in bars} == {57}
    assert re.search(r" 0:00:0\d elapsed  -:--:-- left$", bars[0])
    assert out.getvalue().rindex("\x1b[2K") > out.getvalue().rindex(" left")  # the display is wiped at the end


def live(plan: Plan, run: Run) -> tuple[ConsoleSink, Callable[[], list[str]]]:
    """A sink at a terminal, and what that shows at the moment."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    sink = ConsoleSink(plan, run, console)
    sink.row(START)

    def picture() -> list[str]:
        out.seek(0)
        out.truncate()
        console.print(sink._live)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        return re.split(r"[\r\n]+", text)[:-1] if sink._live else []

    return sink, picture


def test_a_display_shows_numbers_and_what_is_done_beside_the_training(tmp_path: Path) -> None:
    sink, picture = live(make_plan(), Run(tmp_path, "read"))
    sink.progress("saving", 0, 0)
    sink.row({"kind": "checkpoint", "step": 0})
    assert any(line.startswith("starting ") for line in picture())  # a first step may take long
    sink.progress("training", 3, 6)
    assert not any(line.startswith("starting ") for line in picture())
    sink.row(report_of(3) | {"epoch": 0.5})
    assert any(line.startswith("step 3 of 6  ━━━") for line in picture())
    assert "loss  1.9500     images/s now     80" in "".join(picture())
    for what, done, total, name in (
        ("saving", 0, 0, "saving "),
        ("validation", 10, 37, "validating 10 of 37 "),
        ("averaging", 1, 3, "averaging 1 of 3 "),
    ):
        sink.progress(what, done, total)
        assert any(line.startswith(name) for line in picture())
    sink.row(validation_row(3, 0.75))
    assert not any(line.startswith("averaging") for line in picture())
    assert "validation 75.00% at epoch 1" in "".join(picture())
    sink.row({"kind": "interrupted", "step": 3, "why": "signal"})


def test_training_never_waits_for_the_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = live(make_plan(), Run(tmp_path, "read"))
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*_: object) -> list[Text]:
        hangs.set()
        goes_on.wait(30)
        return []

    monkeypatch.setattr("paceline.sink.live.numbers", hang)
    assert hangs.wait(30)
    for step in range(1, 7):
        sink.progress("training", step, 6)
        sink.row(report_of(step))
    assert not goes_on.is_set()
    goes_on.set()
    sink.row({"kind": "failed", "why": "test"})


def test_arithmetic_that_has_changed_is_told_at_the_start(tmp_path: Path) -> None:
    row = START | {"step": 3, "arithmetic_changed": {"precision": ["fp32", "bf16"]}}
    text = shown(make_plan(), Run(tmp_path, "read"), row)
    assert "from step 3 of 6 steps" in text
    assert "on.precision was fp32 and is bf16: rounding changes from here on" in text
