"""An open run: what it changes in the process and restores, and a signal in the middle of a validation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.errors import PlanError
from paceline.training.evaluate import validation_is_owed
from paceline.training.loop import train
from paceline.training.requests import Requests, Signals, Stopped
from paceline.training.restore import restore_newest
from paceline.training.run import out_of_memory
from paceline.training.session import Session, open_session, torch_settings
from paceline.training.state import build_state


class Impatient:
    """Sends the signal once the first images of a validation are evaluated."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.seen: list[int] = []

    def row(self, row: object) -> None:
        """Only progress counts."""

    def progress(self, what: str, done: int, _: int) -> None:
        if what == "validation":
            self.seen.append(done)
            self._signals.stop = True


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    """Sessions whose folders are let go at the end."""
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.run.close()


@pytest.mark.parametrize("every", ["1 epoch", "1 step"])
def test_a_signal_ends_a_validation_saved_and_the_next_start_makes_it_up(
    tmp_path: Path, sessions: list[Session], every: str
) -> None:
    plan = make_plan(f"evaluate.every={every}", "on.micro_batch=4", "on.save=1 epoch")
    signals = Signals()
    impatient = Impatient(signals)
    sessions.append(session := make_session(plan, tmp_path, "own"))
    session.requests, session.run.sinks = Requests(session.world, signals), [impatient]
    with pytest.raises(Stopped):
        train(session)
    step = 1 if every == "1 step" else plan.steps
    assert impatient.seen == [plan.evaluation_batch]
    assert checkpoint.saved_steps(session.run.checkpoints)[-1] == step
    assert not [row for row in session.run.rows() if row["kind"] == "validation"]
    session.run.close()
    sessions.append(again := make_session(plan, tmp_path, "own", state=build_state(plan, session.world)))
    restore_newest(again)
    assert train(again)
    steps = [row["step"] for row in again.run.rows() if row["kind"] == "validation"]
    assert steps == (list(range(1, plan.steps + 1)) if every == "1 step" else [plan.steps])


def test_every_validation_has_a_row_when_it_starts_and_one_when_it_ends(
    tmp_path: Path, sessions: list[Session]
) -> None:
    sessions.append(session := make_session(make_plan("evaluate.every=3 steps"), tmp_path, "own"))
    assert train(session)
    kinds = [row["kind"] for row in session.run.rows() if row["kind"] not in ("report", "checkpoint")]
    assert kinds == ["validation-start", "validation"] * 2


def process_settings() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        signal.getsignal(signal.SIGTERM),
        signal.getsignal(signal.SIGINT),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_a_session_restores_the_process(tmp_path: Path, fails: bool) -> None:
    before = process_settings()
    plan = make_plan("on.cpu_threads=2", "on.deterministic=true")
    try:
        with open_session(plan, tmp_path, signals=True):
            assert torch.get_num_threads() == 2
            assert torch.are_deterministic_algorithms_enabled()
            assert signal.getsignal(signal.SIGTERM) != before[-2]
            if fails:
                raise ValueError("in the midst of it")
    except ValueError:
        assert fails
    assert process_settings() == before
    with open_session(plan, tmp_path):  # the folder was let go too
        pass


def test_a_session_opens_in_any_thread(tmp_path: Path) -> None:
    faults: list[BaseException] = []

    def work() -> None:
        try:
            with open_session(make_plan(), tmp_path, signals=True) as session:
                restore_newest(session)
        except BaseException as fault:  # noqa: BLE001 - told by the test
            faults.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not faults


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("global_batch=32", "norm_batch=8", "on.micro_batch=32"), "such as on.micro_batch=16"),
        (("global_batch=30", "norm_batch=15", "on.micro_batch=30"), "such as on.micro_batch=15"),
        (("global_batch=32", "norm_batch=32", "on.micro_batch=32"), "write on.recompute=all, or more on.replicas"),
        (("global_batch=30", "norm_batch=15", "on.micro_batch=15"), "write on.recompute=all, or more on.replicas"),
    ],
)
def test_the_remedy_for_too_little_memory_fits(words: tuple[str, ...], remedy: str) -> None:
    message = out_of_memory(make_plan(*words))
    assert message.endswith(remedy)
    if "such as" in remedy:
        assert make_plan(*words[:2], message.split("such as ")[1])  # it is not refused in turn


def test_products_are_summed_in_float16_only_inside_a_session_that_says_so() -> None:
    matmul = torch.backends.cuda.matmul
    placement = make_plan("on.device=cpu").placement.model_copy(update={"fp16_accumulation": True})
    assert not matmul.allow_fp16_accumulation
    with torch_settings(placement):
        assert matmul.allow_fp16_accumulation
    assert not matmul.allow_fp16_accumulation


def test_other_threads_make_way_quickly_inside_a_session_only(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    with open_session(make_plan(), tmp_path):
        assert sys.getswitchinterval() < 0.001 < before
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("words", [("on.device=cpu",), ("on.device=cuda", "on.precision=bf16")])
def test_sums_in_float16_are_for_float16_on_cuda(words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="sums products of float16 numbers on a CUDA device"):
        make_plan("on.fp16_accumulation=true", *words)
    assert make_plan("on.fp16_accumulation=true", "on.device=cuda", "on.precision=fp16").placement.fp16_accumulation


def test_a_run_without_validations_trains_the_same_weights(tmp_path: Path, sessions: list[Session]) -> None:
    for words in (["evaluate.every=1 step"], ["evaluate.every=never", "report=1 hour"]):
        plan = make_plan(*words, "on.keep_best=false", "epochs=4 steps")
        sessions.append(session := make_session(plan, tmp_path / words[0], "own"))
        session.requests = Requests(session.world, report_seconds=0)
        assert train(session)
    judged, never = sessions
    assert sorted(row["kind"] for row in never.run.rows()) == ["checkpoint"] * 2 + ["report"] * 4
    assert sum(row["kind"] == "validation" for row in judged.run.rows()) == 4
    losses = [[row["loss"] for row in one.run.rows() if row["kind"] == "report"] for one in sessions]
    assert losses[0] == losses[1]
    assert judged.state.network.checksum() == never.state.network.checksum()
    assert not validation_is_owed(never)


def test_a_validation_of_a_part_says_so(tmp_path: Path, sessions: list[Session]) -> None:
    sessions.append(session := make_session(make_plan("evaluate.limit=10 images"), tmp_path, "own"))
    assert train(session)
    (row,) = [row for row in session.run.rows() if row["kind"] == "validation"]
    assert (row["images"], row["partial"], row["of_images"]) == (10, True, 37)


@pytest.mark.parametrize("word", ["stop.patience=2 validations", "stop.target=50%", "average.last=2"])
def test_what_follows_from_validations_is_refused_where_there_are_none(word: str) -> None:
    with pytest.raises(PlanError, match=r"is about validations, and evaluate\.every is never; leave one of them out"):
        make_plan("evaluate.every=never", word)
