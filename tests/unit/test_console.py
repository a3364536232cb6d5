"""What a person sees of a run: at its start, in a long validation, and at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.planning import Plan
from paceline.record import Row, Run
from paceline.sink.console import ConsoleSink
from paceline.training.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")

START: Row = {"kind": "start", "step": 0, "parameters": 74_900, "arithmetic_changed": {}}


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
    assert f"Next: paceline validate '{run.folder}'" in text
    assert "cifar10" not in text


def test_a_better_checkpoint_than_the_last_is_named(tmp_path: Path) -> None:
    plan = make_plan()
    run = trained(plan, tmp_path / "a run")
    last = [row for row in run.rows() if row["kind"] == "validation"][-1]
    checkpoint.write(run.checkpoints, 3, {})
    run.write(**{**last, "step": 3, "top1": 0.99})
    text = shown(plan, run, {"kind": "end", "step": plan.steps})
    assert f"The best checkpoint: 99.00% after step 3: paceline validate '{run.folder}' --checkpoint best" in text


def test_arithmetic_that_has_changed_is_told_at_the_start(tmp_path: Path) -> None:
    row = START | {"step": 3, "arithmetic_changed": {"precision": ["fp32", "bf16"]}}
    text = shown(make_plan(), Run(tmp_path, "read"), row)
    assert "from step 3 of 6 steps" in text
    assert "on.precision was fp32 and is bf16: rounding changes from here on" in text
