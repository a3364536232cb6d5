"""Which checkpoints stay, and that training goes on while they are written, or cannot be."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load

from conftest import make_plan, make_session, validation_row
from paceline import checkpoint
from paceline.errors import Broken, NotSaved
from paceline.record import Row, Run, rows_of
from paceline.training import save, saver
from paceline.training.saver import Snapshot
from paceline.training.session import Session

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
    monkeypatch.setattr(save, "take_snapshot", lambda state: Snapshot(state.step, {}, {"step": state.step}, None, 0.0))
    return SimpleNamespace(step=0, gathered=lambda keep: nullcontext())


def test_saving_writes_the_step_and_prunes_the_rest(tmp_path: Path, state: Any) -> None:
    plan = make_plan("epochs=6", "on.keep_last=2")
    session = make_session(plan, tmp_path, "own", state=state)
    for state.step in (0, 6, 12, 18):
        save.save(session)
    save.finish_saving(session)
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
    save.finish_saving(session)
    run.close()
    newest = checkpoint.newest_intact(run.checkpoints, lambda _: None)
    assert newest is not None
    assert newest[0] == 15


class SlowDisk:
    """Writes a checkpoint once it is let, and can be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.begun, self.full = threading.Event(), threading.Event(), False
        self._write = checkpoint.write
        monkeypatch.setattr(checkpoint, "write", self.write)

    def write(self, folder: Path, step: int, files: checkpoint.CheckpointFiles) -> Path:
        self.begun.set()
        assert self.free.wait(60)
        if self.full:
            raise Broken(f"step {step}: the checkpoint cannot be written: No space left on device")
        return self._write(folder, step, files)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.free.set()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = make_session(make_plan("epochs=6", "on.keep_last=9"), tmp_path, "own")
    session.run.patient = True
    yield session
    session.finish_writing()
    session.run.close()


def told(session: Session, kind: str) -> list[Row]:
    return [row for row in session.run.rows() if row["kind"] == kind]


def test_training_goes_on_while_the_disk_is_busy_and_what_is_saved_is_the_state_of_its_step(
    session: Session, disk: SlowDisk
) -> None:
    parameter = next(iter(session.state.network.module.parameters()))
    name = next(iter(dict(session.state.network.module.named_parameters())))
    for session.state.step in (1, 2):
        with torch.no_grad():
            parameter.fill_(session.state.step)
        save.save(session)  # comes back though nothing can be written yet
    with torch.no_grad():
        parameter.fill_(3)
    assert disk.begun.wait(60)
    assert not told(session, "checkpoint")  # a row says what is on disk
    disk.free.set()
    save.finish_saving(session)
    for step in (1, 2):
        files = checkpoint.read(session.run.checkpoints / checkpoint.name_of(step))
        assert (load(files[checkpoint.NETWORK])[name] == step).all()
    assert [row["step"] for row in told(session, "checkpoint")] == [1, 2]


@pytest.mark.parametrize("most", ["MOST_WAITING", "MOST_BYTES"])
def test_of_what_waits_for_a_slow_disk_the_oldest_is_left_out_unless_the_end_needs_it(
    session: Session, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    monkeypatch.setattr(saver, most, 0)
    session.saver = save.open_saver(session)
    session.saver.needed = frozenset({3})
    for session.state.step in (1, 2, 3):
        save.save(session)
        assert disk.begun.wait(60)
    later = threading.Thread(target=session.saver.take, args=(saver.take_snapshot(session.state),))
    later.start()  # waits, since nothing that waits can be spared
    disk.free.set()
    later.join(60)
    save.finish_saving(session)
    assert [row["step"] for row in told(session, "checkpoint")] == [1, 3, 3]
    (note,) = told(session, "note")
    assert note["text"].startswith("no checkpoint of step 2: the disk was still busy")


def test_checkpoints_that_no_row_tells_of_yet_have_their_time_too(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("epochs=6", "on.keep_last=1", "on.keep_best=false", "on.keep_every=1 hour")
    session = make_session(plan, tmp_path, "own")
    hours = iter(range(0, 100, 2))
    monkeypatch.setattr(save, "time", SimpleNamespace(time=lambda: 3600 * next(hours), perf_counter=lambda: 0.0))
    for session.state.step in (1, 2, 3):
        save.save(session)
    disk.free.set()
    save.finish_saving(session)
    session.run.close()
    assert checkpoint.saved_steps(session.run.checkpoints) == [1, 2, 3]


def test_a_full_disk_is_told_at_each_attempt_and_refused_only_at_the_end(session: Session, disk: SlowDisk) -> None:
    disk.full = True
    disk.free.set()
    for session.state.step in (1, 2):
        save.save(session)
    with pytest.raises(NotSaved, match=r"step 2: the checkpoint cannot be written: .*; make room, and run the same"):
        save.finish_saving(session)
    assert [row["text"].partition(":")[0] for row in told(session, "note")] == ["step 1", "step 2"]
    disk.full = False
    save.save(session)
    save.finish_saving(session)
    assert [row["step"] for row in told(session, "checkpoint")] == [2]


def test_a_fault_of_the_program_in_the_writing_thread_ends_the_training(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "to_keep", lambda *_: 1 / 0)
    save.save(session)
    with pytest.raises(ZeroDivisionError):
        save.finish_saving(session)


def test_an_aborted_step_that_cannot_be_saved_says_both(session: Session, disk: SlowDisk) -> None:
    disk.full = True
    disk.free.set()
    both = "replica 1 stopped answering; step 0: the checkpoint cannot be written"
    with pytest.raises(NotSaved, match=both), save.saved_if_aborted(session):
        raise Broken("replica 1 stopped answering")


def test_rows_wait_in_memory_for_a_full_disk_and_are_told_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path, "own") as run:
        shown: list[Row] = []
        run.sinks = [SimpleNamespace(row=shown.append, progress=lambda *_: None)]
        run.patient = True
        append, full = "paceline.files.append_line", OSError(errno.ENOSPC, "No space left on device")

        def refuse(*_: object) -> None:
            raise full

        with monkeypatch.context() as patch:
            patch.setattr(append, refuse)
            for step in (1, 2):
                run.write("report", step=step)
            assert rows_of(tmp_path) == []
            assert [row["kind"] for row in run.rows()] == ["report", "note", "report"]
        run.write("report", step=3)
        assert [row["kind"] for row in rows_of(tmp_path)] == ["report", "note", "report", "report"]
        assert [row["kind"] for row in shown] == ["note", "report", "report", "report"]
        assert "No space left on device" in shown[0]["text"]
        run.patient = False
        monkeypatch.setattr(append, refuse)
        with pytest.raises(Broken, match="No space left"):
            run.write("end", step=3)
