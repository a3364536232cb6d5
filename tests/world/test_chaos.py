"""A run that is hit again and again, at random, by what machines do to runs: it ends with the bits of a quiet one."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Training, fingerprint, newest_step, write_small

from conftest import run_in
from paceline import checkpoint
from paceline.record import rows_of

TOO_SMALL = 90_000
"""Bytes of the largest file that a full disk still takes: rows of the record, but no checkpoint of the small recipe."""
RECIPE = {"report": "40 steps"}
WORDS = ("on.save=8 steps", "on.cpu_threads=1", "on.timeout=20", "evaluate.every=25%")


class Chaos:
    """Trains in a folder, hits the training at random moments, and starts it again until it has come to its end."""

    def __init__(self, folder: Path, words: list[str], seed: int) -> None:
        self.folder, self.words, self.run = folder, words, folder / "run"
        self.random, self.hits = random.Random(seed), list[tuple[str, int]]()
        print(f"seed {seed}")
        self.start()

    def start(self) -> None:
        """Start the training; it is the start after those that the record tells of by now."""
        self.starts_before = self.starts()
        self.training = Training(self.folder, *self.words)

    def starts(self) -> int:
        """How many starts have begun to train."""
        return sum(row["kind"] == "start" for row in rows_of(self.run))

    def workers(self) -> list[int]:
        """The processes that train: those that the command has started, or itself."""
        return self.training.replicas() or [self.training.process.pid]

    def hit(self, kind: str, moment: int) -> None:
        """Once a step is saved, let something happen; if it has ended the training, start that again."""
        self.training.wait_until(lambda: newest_step(self.run) >= moment and self.is_training())
        at = newest_step(self.run)
        getattr(self, kind)()
        self.hits.append((kind, at))
        print(f"after step {at}: {kind}")

    def is_training(self) -> bool:
        """Whether the start that is under way has begun to save; the one before may have saved that step already."""
        if self.starts() == self.starts_before:
            return False
        kinds = [row["kind"] for row in rows_of(self.run)]
        return "checkpoint" in kinds[len(kinds) - kinds[::-1].index("start") :]

    def finish(self) -> None:
        """Let it come to its end."""
        status, _, errors = self.training.end()
        assert status == 0, errors
        assert rows_of(self.run)[-1]["kind"] == "end"

    def again(self, *expected: int) -> None:
        """Wait until the training has ended with one of these statuses, and run the same command again."""
        status, _, errors = self.training.end()
        assert status in expected, (status, errors)
        self.start()

    def killed_worker(self) -> None:
        os.kill(self.random.choice(self.workers()), signal.SIGKILL)
        self.again(1, -signal.SIGKILL)

    def killed_launcher(self) -> None:
        self._kill_launcher()
        self.start()

    def _kill_launcher(self) -> None:
        workers = self.workers()
        self.training.kill()
        ended_themselves = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < ended_themselves, "an orphan trains on"
            time.sleep(0.01)

    def terminated(self) -> None:
        self.training.process.send_signal(self.random.choice([signal.SIGTERM, signal.SIGUSR1]))
        self.again(75)

    def stopped_for_a_while(self) -> None:
        worker = self.random.choice(self.workers())
        os.kill(worker, signal.SIGSTOP)
        time.sleep(self.random.random())
        os.kill(worker, signal.SIGCONT)

    def full_disk(self) -> None:
        first = self.workers()[0]
        before, told = resource.prlimit(first, resource.RLIMIT_FSIZE), self._notes("training goes on, and saves again")
        for most in (TOO_SMALL, 0):  # first no checkpoint fits, then not even a row
            resource.prlimit(first, resource.RLIMIT_FSIZE, (most, before[1]))
            if most:
                self.training.wait_until(lambda: self._notes("training goes on, and saves again") > told)
        time.sleep(0.3)
        saved = newest_step(self.run)
        resource.prlimit(first, resource.RLIMIT_FSIZE, before)
        self.training.wait_until(lambda: newest_step(self.run) > saved)

    def flipped_byte(self) -> None:
        self._kill_launcher()
        newest = self.run / "checkpoints" / checkpoint.name_of(newest_step(self.run)) / checkpoint.NETWORK
        content = bytearray(newest.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        newest.write_bytes(content)
        damaged = self._notes("damaged, taking the one before it")
        self.start()
        self.training.wait_until(lambda: self._notes("damaged, taking the one before it") > damaged)

    def _notes(self, text: str) -> int:
        return sum(row["kind"] == "note" and text in row["text"] for row in rows_of(self.run))


# A cable that is pulled out is in test_two_hosts.py.
KINDS = ["killed_worker", "killed_launcher", "terminated", "stopped_for_a_while", "full_disk", "flipped_byte"]


def run_through(folder: Path, words: list[str], kinds: list[str], steps: int, more: int = 0) -> list[tuple[str, int]]:
    """Hit a run by each of these and by so many more at random, and let it finish."""
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10**6))
    chaos = Chaos(folder, [*words, "--out", "run"], seed)
    kinds = [*kinds, *chaos.random.choices(KINDS, k=more)]
    chaos.random.shuffle(kinds)
    print(", ".join(kinds))
    try:
        for number, kind in enumerate(kinds):
            # In the first half, so that a disk that is full for a while is not full at the end.
            first, last = (16 + steps // 2 * n // len(kinds) for n in (number, number + 1))
            chaos.hit(kind, chaos.random.randrange(first, last))
        chaos.finish()
    finally:
        chaos.training.process.kill()
    assert all(0 < step < steps for _, step in chaos.hits), chaos.hits
    return chaos.hits


def test_a_run_that_is_killed_and_damaged_and_finds_the_disk_full_ends_with_the_same_bits(tmp_path: Path) -> None:
    recipe = write_small(tmp_path, epochs="100", **RECIPE)
    words = ["train", recipe, *WORDS]
    done = run_in(tmp_path, *words, "--out", "whole")
    assert done.returncode == 0, done.stderr
    run_through(tmp_path, words, ["full_disk", "flipped_byte"], 600)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "epochs"), [((), 400), (("on.stages=2", "on.micro_batch=4"), 100)], ids=["2-replicas", "2-x-2-stages"]
)
def test_a_run_that_is_hit_twenty_times_by_everything_ends_with_the_same_bits(
    tmp_path: Path, layout: tuple[str, ...], epochs: int
) -> None:
    recipe = write_small(tmp_path, epochs=str(epochs), **RECIPE)
    words = ["train", recipe, *WORDS, "--replicas", "2", *layout]
    done = run_in(tmp_path, *words, "--out", "whole")
    assert done.returncode == 0, done.stderr
    hits = run_through(tmp_path, words, KINDS * 3, 6 * epochs, more=2)
    assert len(hits) == 20
    assert Counter(kind for kind, _ in hits) >= Counter(KINDS * 3)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


class Torchrun(Training):
    """Two replicas that torchrun starts, and starts again."""

    def __init__(self, folder: Path, *words: str) -> None:
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        super().__init__(folder, *words, program=[*program, "--standalone", "-m", "paceline"])


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., Torchrun]]:
    """Starts two replicas under torchrun, which do not outlive the test."""
    started: list[Torchrun] = []

    def start(*words: str) -> Torchrun:
        started.append(Torchrun(tmp_path, *words))
        return started[-1]

    yield start
    for training in started:
        training.process.kill()


@pytest.mark.long
def test_torchrun_starts_a_killed_replica_again_and_a_killed_torchrun_leaves_no_orphans(
    tmp_path: Path, torchrun: Callable[..., Torchrun]
) -> None:
    words = ["train", write_small(tmp_path, epochs="200", **RECIPE), *WORDS]
    done = run_in(tmp_path, *words, "--replicas", "2", "--out", "whole")
    assert done.returncode == 0, done.stderr
    training = torchrun(*words, "--out", "run")
    training.wait_until(training.saved(100))
    os.kill(training.replicas()[1], signal.SIGKILL)
    training.wait_until(lambda: sum(row["kind"] == "start" for row in rows_of(training.run)) == 2)
    training.wait_until(training.saved(newest_step(training.run) + 100))
    workers = training.replicas()
    training.kill()
    gone = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < gone, "an orphan trains on"
        time.sleep(0.01)
    again = torchrun(*words, "--out", "run")
    status, _, errors = again.end()
    assert status == 0, errors
    assert sum(row["kind"] == "start" for row in rows_of(again.run)) == 3
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
