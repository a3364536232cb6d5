"""Who decodes a batch: threads of the replica, or processes that write into memory they share with it."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.index import file
from paceline.errors import Broken

Pictures = NDArray[np.uint8]
Faults = list[tuple[int, str]]
"""The images of a chunk that cannot be decoded, by their place in it, and why."""
STOPS = (signal.SIGINT, signal.SIGTERM)
"""What asks a run to stop; sent to all of its processes, the replica alone acts on it."""


@dataclass(frozen=True)
class Chunk:
    """Images of a batch that one worker decodes."""

    split: str
    numbers: NDArray[np.int64]
    boxes: NDArray[Any]
    mirrored: NDArray[np.bool_]
    positions: NDArray[np.int64] | None
    """Where training images stand in the endless list."""


Fill = Callable[[Chunk, Pictures], Faults]
"""Decodes a chunk into its pictures."""


class Batch(Protocol):
    """Pictures of one size that are being decoded."""

    pictures: Pictures

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        """Start on a chunk, whose first picture is number `first`; what is given waits for it."""
        ...

    def sent(self) -> Tensor:
        """The pictures on the device; nothing is written to the batch after that."""
        ...


class Workers(Protocol):
    """Who decodes."""

    def batch(self, shape: tuple[int, ...]) -> Batch:
        """Room for pictures."""
        ...

    def drop(self) -> None:
        """Do not begin what was asked for and has not begun: nobody waits for it any more."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class Threads:
    """Threads of this process: there at once, and without memory of their own."""

    def __init__(self, fill: Fill, count: int, device: torch.device) -> None:
        self.fill, self.device, self.begun = fill, device, WeakSet[Future[Faults]]()
        self.pool = ThreadPoolExecutor(count, "images")

    def batch(self, shape: tuple[int, ...]) -> Batch:
        return _ThreadBatch(self, shape)

    def drop(self) -> None:
        _drop(self.begun)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class _ThreadBatch:
    def __init__(self, threads: Threads, shape: tuple[int, ...]) -> None:
        self._threads = threads
        self._tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=threads.device.type == "cuda")
        self.pictures: Pictures = self._tensor.numpy()

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        into = self.pictures[first : first + len(chunk.numbers)]
        future = self._threads.pool.submit(self._threads.fill, chunk, into)
        self._threads.begun.add(future)
        return future.result

    def sent(self) -> Tensor:
        return self._tensor.to(self._threads.device, non_blocking=True)


class Processes:
    """Processes that open the data themselves; they end with this one, however it ends."""

    def __init__(self, makes: Callable[[], Fill], count: int, device: torch.device) -> None:
        self.device, self.free, self._begun = device, list[_Shared](), WeakSet[Future[Faults]]()
        self._taking = threading.Lock()
        self._pool = ProcessPoolExecutor(count, server(), _begin, (makes,))

    def batch(self, shape: tuple[int, ...]) -> Batch:
        size = int(np.prod(shape))
        with self._taking:  # steps and validation are prepared by threads of their own
            shared = next((some for some in self.free if some.size >= size), None)
            if shared is not None:
                self.free.remove(shared)
            else:  # batches have grown: what is too small now will not be asked for again
                while self.free:
                    self.free.pop().close()
        if shared is None:
            shared = _Shared(size, self.device)
        shared.wait()
        return _ProcessBatch(self, shared, shape)

    def drop(self) -> None:
        _drop(self._begun)

    def submit(self, *work: Any) -> Callable[[], Faults]:
        """Have a worker decode."""

        def guarded(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except BrokenProcessPool:
                raise Broken(
                    "a process that decodes images was killed; if memory is short, write a smaller on.loader_workers"
                ) from None

        future: Future[Faults] = guarded(lambda: self._pool.submit(_decode, *work))
        self._begun.add(future)
        return lambda: list(guarded(future.result))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def server() -> ForkServerContext:
    """What worker processes come from: one process that goes on when a signal asks the run to stop."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.data.load.files"])  # so that torch is loaded once, and shared
    resource_tracker.ensure_running()  # if it began in the call below, it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:  # what it begins with blocked stays so, and one that is meant for this process comes a moment later
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


_numbers = itertools.count()
"""Tell one memory from another that has its path, once the first is gone."""


class _Shared:
    """Memory for a batch that workers write to; for a CUDA device it is pinned."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.number = next(_numbers)
        self._lent = file.Memory(self.size)
        self.path = self._lent.path
        self.memory = np.frombuffer(self._lent.mapped, np.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied:
            torch.cuda.cudart().cudaHostRegister(self.memory.ctypes.data, self.size, 0)

    def sent(self, pictures: Pictures, device: torch.device) -> Tensor:
        """Pictures that lie here, on the device."""
        if self._copied is None:
            return torch.from_numpy(pictures).clone()
        moved = torch.from_numpy(pictures).to(device, non_blocking=True)
        self._copied.record()
        return moved

    def close(self) -> None:
        """Let the memory go."""
        if self._copied:
            self._copied.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
        self._lent.close()

    def wait(self) -> None:
        """Until the last copy from here is done."""
        if self._copied:
            self._copied.synchronize()


class _ProcessBatch:
    def __init__(self, processes: Processes, shared: _Shared, shape: tuple[int, ...]) -> None:
        self._processes, self._shared, self._shape = processes, shared, shape
        self.pictures: Pictures = shared.memory[: int(np.prod(shape))].reshape(shape)

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        shared = self._shared
        return self._processes.submit(chunk, shared.path, shared.number, shared.size, self._shape, first)

    def sent(self) -> Tensor:
        moved = self._shared.sent(self.pictures, self._processes.device)
        self._processes.free.append(self._shared)
        return moved


def _drop(begun: WeakSet[Future[Faults]]) -> None:
    for future in list(begun):
        future.cancel()


_fill: Fill
_mapped: dict[str, tuple[int, Pictures]] = {}


def begin() -> None:
    """What every worker process does first."""
    for number in STOPS:  # the replica decides when its workers end
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_replica, daemon=True).start()
    torch.set_num_threads(1)


def _begin(makes: Callable[[], Fill]) -> None:
    begin()
    global _fill  # noqa: PLW0603 - a process works for one plan
    try:
        _fill = makes()
    except Exception as fault:  # noqa: BLE001 - from here it would look as if the process had been killed
        _fill = _failing(fault)


def _failing(fault: Exception) -> Fill:
    """Tells of a fault to whoever has a chunk decoded."""

    def fill(*_: object) -> Faults:
        raise fault

    return fill


def _end_with_the_replica() -> None:
    replica = multiprocessing.parent_process()
    assert replica is not None
    connection.wait([replica.sentinel])
    os._exit(1)


def _decode(chunk: Chunk, path: str, number: int, size: int, shape: tuple[int, ...], first: int) -> Faults:
    if path not in _mapped or _mapped[path][0] != number:
        with Path(path).open("r+b") as file:
            _mapped[path] = number, np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    batch = _mapped[path][1][: int(np.prod(shape))].reshape(shape)
    return _fill(chunk, batch[first : first + len(chunk.numbers)])
