"""A pool of processes that transcode images: a damaged image may kill one, and the results still come in order."""

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
from paceline.data.pack.transcode import PackedImage, SourceImage, transcode
from paceline.errors import Broken, UserError

_QUEUED = 16
"""Images that a worker has in its queue, so that it never waits for the next."""
_MOST_BYTES = 256 << 20
"""Bytes of images that may be ready before their turn."""
_KILLED_BY_IMAGE = {
    libjpeg.FATAL,
    *(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)),
}
"""Exit statuses of a process that a damaged image has killed."""


class _Worker:
    """A process, and the images in its queue."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, SourceImage]] = deque()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that reading ends when the process does

    def submit(self, position: int, image: SourceImage) -> None:
        self.queue.append((position, image))
        with suppress(BrokenPipeError):  # it has died: that shows when its answer is read
            self.connection.send(image)

    def receive(self) -> tuple[int, PackedImage] | None:
        """The next result and its position; None if the process has died."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return None
        position, _ = self.queue.popleft()
        if isinstance(answer, UserError):
            raise answer
        assert isinstance(answer, PackedImage)
        return position, answer

    def respawn(self) -> _Worker:
        """A new worker with the same queue, whose first image, which killed this one, is now packed as it is."""
        position, image = self.queue.popleft()
        status = self._process.exitcode
        if status not in _KILLED_BY_IMAGE or image.as_it_is:
            raise Broken(
                f"{image.path}: a worker process ended with status {status} while it had this file; if memory is "
                "short, start again with a smaller --processes: what is done is kept"
            )
        worker = _Worker()
        for entry in [(position, replace(image, as_it_is=True)), *self.queue]:
            worker.submit(*entry)
        return worker

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection) -> None:
    """What a worker does until its connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when Ctrl-C ends a worker
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            image = connection.recv()
            try:
                answer: PackedImage | UserError = transcode(image)
            except UserError as fault:
                answer = fault
            connection.send(answer)


def ordered_pool(images: Iterable[SourceImage], processes: int | None = None) -> Generator[PackedImage, None, None]:
    """Transcode images in several processes, and yield the results in the order of the images."""
    count = processes or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    remaining = enumerate(images)
    workers = [_Worker() for _ in range(count)]
    ready: dict[int, PackedImage] = {}
    turn, ready_bytes, exhausted = 0, 0, False
    try:
        while True:
            for worker in workers:
                while not exhausted and ready_bytes < _MOST_BYTES and len(worker.queue) < _QUEUED:
                    following = next(remaining, None)
                    if following is None:
                        exhausted = True
                    else:
                        worker.submit(*following)
            if not any(worker.queue for worker in workers):
                return
            for connection in wait([worker.connection for worker in workers if worker.queue]):
                index = next(index for index, worker in enumerate(workers) if worker.connection is connection)
                result = workers[index].receive()
                if result is None:
                    workers[index] = workers[index].respawn()
                else:
                    ready[result[0]] = result[1]
                    ready_bytes += len(result[1].encoded)
            while turn in ready:
                ready_bytes -= len(ready[turn].encoded)
                yield ready.pop(turn)
                turn += 1
    finally:
        for worker in workers:
            worker.stop()
