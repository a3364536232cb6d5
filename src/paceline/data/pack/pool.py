"""Worker processes that prepare pictures: each may die of a damaged one, and the pictures still come out in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from paceline.data.pack import libjpeg
from paceline.data.pack.transcode import Job, Picture, prepare
from paceline.errors import Broken, UserError

_WAITING = 16
"""Pictures that a worker has been given, so that it never waits for the next."""
_MOST_BYTES = 256 << 20
"""Bytes of pictures that may be ready before their turn."""
_DIED_OF_IT = {libjpeg.FATAL, *(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL))}
"""How a process ends that a damaged picture has ended."""


class _Worker:
    """A process, and the pictures that it has been given and not yet handed back."""

    def __init__(self) -> None:
        self.given: deque[tuple[int, Job]] = deque()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that reading ends when the process does

    def give(self, number: int, job: Job) -> None:
        self.given.append((number, job))
        with suppress(BrokenPipeError):  # it has died: that shows when its answer is read
            self.connection.send(job)

    def take(self) -> tuple[int, Picture] | None:
        """The next picture; None if the process has died of it."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return None
        number, _ = self.given.popleft()
        if isinstance(answer, UserError):
            raise answer
        assert isinstance(answer, Picture)
        return number, answer

    def replacement(self) -> _Worker:
        """A new worker with the same pictures, of which the first, which ended this one, is kept as it is."""
        number, job = self.given.popleft()
        status = self._process.exitcode
        if status not in _DIED_OF_IT or job.keep:
            raise Broken(
                f"{job.path}: a worker process ended with status {status} while it had this file; if memory is short, "
                "start again with a smaller --processes: what is done is kept"
            )
        new = _Worker()
        for mine in [(number, replace(job, keep=True)), *self.given]:
            new.give(*mine)
        return new

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection) -> None:
    """What a worker does until its connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when Ctrl-C ends a worker
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            try:
                answer: Picture | UserError = prepare(job)
            except UserError as fault:
                answer = fault
            connection.send(answer)


def prepared(jobs: Iterable[Job], processes: int | None = None) -> Generator[Picture, None, None]:
    """Every job's picture, in the order of the jobs."""
    count = processes or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    todo = enumerate(jobs)
    workers = [_Worker() for _ in range(count)]
    ready: dict[int, Picture] = {}
    turn, held, exhausted = 0, 0, False
    try:
        while True:
            for worker in workers:
                while not exhausted and held < _MOST_BYTES and len(worker.given) < _WAITING:
                    following = next(todo, None)
                    if following is None:
                        exhausted = True
                    else:
                        worker.give(*following)
            if not any(worker.given for worker in workers):
                return
            for connection in wait([worker.connection for worker in workers if worker.given]):
                place = next(number for number, worker in enumerate(workers) if worker.connection is connection)
                answer = workers[place].take()
                if answer is None:
                    workers[place] = workers[place].replacement()
                else:
                    ready[answer[0]] = answer[1]
                    held += len(answer[1].encoded)
            while turn in ready:
                held -= len(ready[turn].encoded)
                yield ready.pop(turn)
                turn += 1
    finally:
        for worker in workers:
            worker.stop()
