"""Which checkpoints stay: the newest few, the best judged one, one of each stretch, and always the one just written."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import make_plan, make_session, validation_row
from paceline import checkpoint
from paceline.record import Row
from paceline.training import save

SAVED = [0, 6, 12, 18, 24, 30, 36]


def saved_at(**hours: float) -> list[Row]:
    rows = [
        {"kind": "checkpoint", "step": int(name.removeprefix("s")), "time": 9e8 + 3600 * h} for name, h in hours.items()
    ]
    return [{"kind": "start", "step": 0}, *rows]


def judged(**top1: float) -> list[Row]:
    return [validation_row(int(step.removeprefix("s")), value) for step, value in top1.items()]


def lost(**loss: float | None) -> list[Row]:
    """Validations that differ in their losses, of which a lower accuracy has the lower loss."""
    steps = {int(step.removeprefix("s")): value for step, value in loss.items()}
    return [validation_row(step, min(1.0, value or 0.0)) | {"loss": value} for step, value in steps.items()]


@pytest.mark.parametrize(
    ("words", "rows", "kept"),
    [
        ((), [], {24, 30, 36}),
        (("on.keep_last=1",), [], {36}),
        (("on.keep_last=100",), [], set(SAVED)),
        (("on.keep_last=1",), judged(s6=0.5, s12=0.9, s18=0.7), {12, 36}),
        (("on.keep_last=1",), judged(s6=0.9, s12=0.9, s18=0.7), {6, 36}),  # of equals the first
        (("on.keep_last=1",), judged(s6=0.9, s7=0.95), {6, 36}),  # a step without a checkpoint does not count
        (("on.keep_last=1",), judged(s6=0.9, s12=0.5) + judged(s6=0.1), {12, 36}),  # the newest row of a step counts
        (("on.keep_last=1", "on.keep_best=false"), judged(s6=0.9), {36}),
        (("on.keep_last=1", "stop.metric=loss"), lost(s6=0.9, s12=0.5, s18=0.7), {12, 36}),
        (("on.keep_last=1", "stop.metric=loss"), lost(s6=None, s12=1e9, s18=1e9), {12, 36}),  # null is no loss
        (("on.keep_last=1", "stop.metric=loss"), lost(s6=None), {36}),
        (("on.keep_last=1", "on.keep_every=12 steps"), [], {0, 12, 24, 36}),
        (("on.keep_last=1", "on.keep_every=2 epochs"), [], {0, 12, 24, 36}),
        (("on.keep_last=1", "on.keep_every=15 steps"), [], {0, 18, 30, 36}),
        (
            ("on.keep_last=1", "on.keep_every=2 hours"),
            saved_at(s0=0, s6=1, s12=1.9, s18=2.1, s24=3, s30=6),
            {0, 18, 30, 36},
        ),
        (("on.keep_last=1", "on.keep_every=2 hours"), [], {36}),  # rows that are gone have no time
        (("on.keep_last=1",), [*judged(s6=0.9, s12=0.5), judged(s18=0.99)[0] | {"partial": True}], {6, 36}),
        (("on.keep_last=1",), [judged(s18=0.99)[0] | {"partial": True}], {18, 36}),
        (("on.keep_last=2", "on.keep_every=50%"), judged(s24=0.3), {0, 18, 24, 30, 36}),
    ],
)
def test_the_newest_the_best_and_one_of_each_stretch_stay(
    words: tuple[str, ...], rows: list[Row], kept: set[int]
) -> None:
    plan = make_plan("epochs=6", *words)
    assert plan.steps == 36
    assert save.to_keep(plan, SAVED, rows) == kept


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A state that is nothing but a step."""
    monkeypatch.setattr(save, "to_files", lambda state: {"state.json": str(state.step).encode()})
    return SimpleNamespace(step=0, gathered=lambda keep: nullcontext())


def test_saving_writes_the_step_and_prunes_the_rest(tmp_path: Path, state: Any) -> None:
    plan = make_plan("epochs=6", "on.keep_last=2")
    session = make_session(plan, tmp_path, "own", state=state)
    for state.step in (0, 6, 12, 18):
        save.save(session)
    assert checkpoint.saved_steps(session.run.checkpoints) == [12, 18]
    assert [row["step"] for row in session.run.rows() if row["kind"] == "checkpoint"] == [0, 6, 12, 18]
    session.run.close()


def test_only_the_writer_saves(tmp_path: Path, state: Any) -> None:
    save.save(make_session(make_plan(), tmp_path, state=state))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_what_was_just_saved_stays_beside_damaged_checkpoints_of_later_steps(
    keep_last: int, tmp_path: Path, state: Any
) -> None:
    """A run whose newest checkpoints are damaged resumes from an older one; what it then saves must not be pruned."""
    plan = make_plan("epochs=6", f"on.keep_last={keep_last}")
    session = make_session(plan, tmp_path, "own", state=state)
    run = session.run
    for step in (20, 30, 36):
        checkpoint.write(run.checkpoints, step, {"state.json": b"{}"})
        (run.checkpoints / checkpoint.name_of(step) / "state.json").write_bytes(b"damaged")
    state.step = 15
    save.save(session)
    run.close()
    newest = checkpoint.newest_intact(run.checkpoints, lambda _: None)
    assert newest is not None
    assert newest[0] == 15
