"""Ctrl-C on a terminal, which leaves nothing of the bar, and signals that come before training begins."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from processes import Training, newest_step, write_small

from conftest import environment, run_in
from paceline.record import rows_of
from paceline.starting import EARLY_STOPS, interruptible


@pytest.mark.long
def test_an_interrupt_at_a_terminal_is_answered_and_saved(tmp_path: Path) -> None:
    words = ["train", write_small(tmp_path, epochs="100000"), "report=100 epochs", "--out", "run", "on.save=20 steps"]
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal,
        env=environment() | {"TERM": "xterm", "COLUMNS": "80"}, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    end = time.monotonic() + 120
    sent = False
    while time.monotonic() < end:
        try:
            shown += os.read(screen, 65536)
        except OSError:  # the other end is closed
            break
        if not sent and newest_step(tmp_path / "run") >= 20:
            os.kill(process.pid, 2)
            sent = True
    os.close(screen)
    assert process.wait(10) == 75
    text = shown.decode()
    assert "\\x1b" not in text  # what steers the terminal reached it as it is
    answer, saved = text.index("then saving; press again to stop without"), text.index("Interrupted after step")
    assert answer < saved
    assert text.rindex(" left") < text.rindex("\x1b[2K") < saved
    assert rows_of(tmp_path / "run")[-1]["kind"] == "interrupted"


BEFORE = "Interrupted before training began; nothing new is saved. Run the same command again to go on.\n"
each_signal = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process has set a handler for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> number - 1 & 1)


def has_replicas(training: Training) -> bool:
    """Whether a command has started a process."""
    return bool(training.replicas())


@each_signal
def test_a_signal_before_training_ends_a_command_as_one_to_run_again(tmp_path: Path, number: signal.Signals) -> None:
    train = ["train", write_small(tmp_path), "--out", "run"]
    for words, stage in ((train, "plan"), (train, "torch"), (["resume", "run"], "plan")):  # what is being loaded
        training = Training(tmp_path, *words)
        training.wait_until(partial(has_handler, training.process.pid, number), 20)
        if stage == "torch":
            training.wait_until((tmp_path / "run/plan.yaml").exists)
        training.process.send_signal(number)
        assert training.end() == (75, BEFORE, "")
    assert rows_of(tmp_path / "run") == []
    assert Training(tmp_path, *train).end()[0] == 0
    assert rows_of(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.long
@each_signal
def test_a_signal_before_replicas_train_ends_a_command_as_one_to_run_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = ["train", write_small(tmp_path), "--out", "run", "--replicas", "2"]
    for delay in (0.0, 0.5, 1.0):  # after the first replica is there
        training = Training(tmp_path, *words)
        training.wait_until(partial(has_replicas, training))
        time.sleep(delay)
        training.process.send_signal(number)
        assert training.end() == (75, BEFORE, "")
    assert rows_of(tmp_path / "run") == []
    assert Training(tmp_path, *words).end()[0] == 0


def test_signals_are_restored_and_mean_what_they_do_to_any_process_once_a_run_has_trained(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in EARLY_STOPS]
    with interruptible():
        assert before != [signal.getsignal(number) for number in EARLY_STOPS]
    assert before == [signal.getsignal(number) for number in EARLY_STOPS]
    program = "import os; from paceline.starting import *; f = interruptible(); f.__enter__(); training_begins(); {}"
    done = run_in(tmp_path, program=program.format("os.kill(os.getpid(), 15)"))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


def at_a_terminal(folder: Path, words: list[str], *, nohup: bool) -> tuple[int, int]:
    """The process of a command whose own terminal this is, and what the terminal shows."""
    process, screen = pty.fork()
    if not process:
        os.chdir(folder)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # the tests may be under nohup, too
        os.execvpe(
            sys.executable, [sys.executable, "-m", "paceline", *words],
            environment() | {"TERM": "xterm", "COLUMNS": "80"},
        )  # fmt: skip
    return process, screen


def read_until(stream: int, words: bytes) -> None:
    shown = b""
    while words not in shown:
        more = os.read(stream, 4096)
        assert more, shown
        shown += more


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("nohup", [False, True])
def test_a_run_whose_terminal_is_closed_saves_or_under_nohup_trains_on(
    tmp_path: Path, replicas: int, nohup: bool
) -> None:
    page = write_small(tmp_path, epochs="60" if nohup else "100000")
    words = ["train", page, "report=10 steps", "on.save=100000 epochs", "--out", "run", "--replicas", str(replicas)]
    process, screen = at_a_terminal(tmp_path, words, nohup=nohup)
    read_until(screen, b"top-1")
    os.close(screen)  # the kernel sends SIGHUP
    _, status = os.waitpid(process, 0)
    rows = rows_of(tmp_path / "run")
    assert os.waitstatus_to_exitcode(status) == (0 if nohup else 75)
    assert rows[-1]["kind"] == ("end" if nohup else "interrupted")
    assert newest_step(tmp_path / "run") == rows[-1]["step"] > 0


def test_a_run_whose_output_nobody_reads_any_more_trains_to_its_end(tmp_path: Path) -> None:
    words = ["train", write_small(tmp_path, epochs="30"), "report=1 steps", "--out", "run"]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, stdout=writing, stderr=writing, env=environment()
    )
    os.close(writing)
    read_until(reading, b"loss")
    os.close(reading)
    assert process.wait(120) == 0
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["kind"] == "end"
    assert rows[-1]["step"] == rows[0]["steps"]
