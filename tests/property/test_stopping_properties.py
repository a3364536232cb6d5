"""Where validations end a run: after the same step, on every layout and however often it is interrupted."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.data.load.class_weights import class_weights
from paceline.record import Row
from paceline.training.loop import train
from paceline.training.requests import Requests, Signals, Stopped
from paceline.training.restore import restore_newest
from paceline.training.state import build_state
from paceline.world import World

WORDS = (
    "on.precision=fp64", "norm=none", "epochs=4", "optimizer.lr=0.01", "evaluate.every=1 steps", "report=9 steps",
    "on.save=5 steps",
)  # fmt: skip
STOPS = {
    "patience": ("stop.patience=4 validations",),
    "target": ("stop.target=18%",),
    "loss": ("stop.metric=loss", "stop.patience=2 validations"),
    "weighted": ("stop.metric=loss", "stop.patience=2 validations", "loss.class_weights=balanced"),
    "both": ("stop.metric=loss", "stop.patience=2 validations", "stop.target=2.3255"),
}


class Interrupt:
    """Sends a signal at some moment: after a step, or in the validation that follows it."""

    def __init__(self, signals: Signals, step: int, what: str) -> None:
        self._signals, self._step, self._what = signals, step, what
        self._trained = 0

    def row(self, row: Row) -> None:
        """Only progress counts."""

    def progress(self, what: str, done: int, _: int) -> None:
        self._trained = done if what == "training" else self._trained
        if self._trained >= self._step and what == self._what:
            self._signals.stop = True


def start(folder: Path, words: tuple[str, ...], interrupt: tuple[int, str] | None) -> bool:
    """Train until the end of the run or the interruption; whether it has come to the end."""
    plan = make_plan(*WORDS, *words)
    signals, world = Signals(), World(make_session(plan).world.device)
    weights = class_weights(plan, None)
    state = build_state(plan, world, [*weights.values()] if weights else None)
    session = make_session(plan, folder, "own", world, state)
    session.requests = Requests(world, signals)
    if interrupt:
        session.run.sinks = [Interrupt(signals, *interrupt)]
    try:
        restore_newest(session)
        return train(session)
    except Stopped:
        return False
    finally:
        session.run.close()


def outcome(folder: Path) -> tuple[Any, ...]:
    """Where and why a run ended, and what every validation counted."""
    rows = [*(make_session(make_plan(), folder).run.rows())]
    stop = next(row for row in reversed(rows) if row["kind"] == "stop")
    validations = {row["step"]: (row["top1"], row["top5"]) for row in rows if row["kind"] == "validation"}
    tables = sorted(path.read_text() for path in folder.glob("validation/*/confusion.csv"))
    newest = checkpoint.saved_steps(folder / "checkpoints")[-1]
    return stop["step"], newest, stop["reason"], stop["best_step"], stop["no_better"], validations, tables


@functools.cache
def unbroken(kind: str) -> tuple[Any, ...]:
    with tempfile.TemporaryDirectory() as folder:
        assert start(Path(folder), (*STOPS[kind], "on.micro_batch=16"), None)
        return outcome(Path(folder))


@pytest.mark.parametrize("kind", STOPS)
def test_the_runs_of_this_page_end_before_their_last_step(kind: str) -> None:
    assert 2 < unbroken(kind)[0] < make_plan(*WORDS).steps


@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    st.sampled_from([*STOPS]),
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from(["training", "validation"]), st.sampled_from([4, 8, 16])),
        max_size=2,
    ),
)
def test_a_run_ends_after_the_same_step_whatever_interrupts_it(kind: str, breaks: list[tuple[int, str, int]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        done = False
        for step, what, micro_batch in breaks:
            done = done or start(folder, (*STOPS[kind], f"on.micro_batch={micro_batch}"), (step, what))
        done = done or start(folder, (*STOPS[kind], "on.micro_batch=8"), None)
        assert done
        assert outcome(folder) == unbroken(kind)
        assert start(folder, (*STOPS[kind], "on.micro_batch=16"), None)  # nothing is left to do
        assert outcome(folder) == unbroken(kind)
    finally:
        shutil.rmtree(folder)
