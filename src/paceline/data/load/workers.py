"""The workers that decode a batch: threads, or processes that write into memory they share with the replica."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.shared_memory import Handle, Memory
from paceline.errors import Broken
from paceline.numpy_types import Bools, Int64s, UInt8s
from paceline.starting import STOPS

Faults = list[tuple[int, str]]
"""The images of a chunk that cannot be decoded, by their offset in it, and why."""

_SWITCH = 0.00001
"""Seconds after which a thread that computes in Python lets another one go on. Python's own 5 ms would hold up a
thread that decodes for longer than decoding takes, each time it comes back from the decoder, and the thread that
launches kernels for as long as most steps take."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Inside, no thread that computes in Python holds up the others for long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(_SWITCH, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass(frozen=True)
class Chunk:
    """Images of a batch that one worker decodes."""

    split: str
    indices: Int64s
    boxes: NDArray[Any]
    flipped: Bools
    positions: Int64s | None
    """Where training images stand in the endless list."""


Fill = Callable[[Chunk, UInt8s], Faults]
"""Decodes a chunk into an array of its images."""


class DecodingBatch(Protocol):
    """Images of one size that are being decoded."""

    images: UInt8s

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        """Start to decode a chunk into the batch from index `first` on; the returned function waits for it."""

    def to_device(self) -> Tensor:
        """The images on the device; nothing may be written to the batch after that."""


class Workers(Protocol):
    """Threads or processes that decode."""

    def batch(self, shape: tuple[int, ...]) -> DecodingBatch:
        """A new batch of this shape."""

    def cancel(self) -> None:
        """Cancel what has not begun: nobody waits for it any more."""

    def close(self) -> None:
        """End them."""


class Threads:
    """Threads of this process, which start at once and need no memory of their own."""

    def __init__(self, fill: Fill, count: int, device: torch.device) -> None:
        self.fill, self.device, self.futures = fill, device, WeakSet[Future[Faults]]()
        self.pool = ThreadPoolExecutor(count, "images")

    def batch(self, shape: tuple[int, ...]) -> DecodingBatch:
        return _ThreadBatch(self, shape)

    def cancel(self) -> None:
        _cancel(self.futures)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class _ThreadBatch:
    def __init__(self, threads: Threads, shape: tuple[int, ...]) -> None:
        self._threads = threads
        self._tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=threads.device.type == "cuda")
        self.images: UInt8s = self._tensor.numpy()

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        into = self.images[first : first + len(chunk.indices)]
        future = self._threads.pool.submit(self._threads.fill, chunk, into)
        self._threads.futures.add(future)
        return future.result

    def to_device(self) -> Tensor:
        return self._tensor.to(self._threads.device, non_blocking=True)


class Processes:
    """Processes that open the data themselves; they end with this one, however it ends."""

    def __init__(self, open_fill: Callable[[], Fill], count: int, device: torch.device) -> None:
        self.device, self.free, self._futures = device, list[_Shared](), WeakSet[Future[Faults]]()
        self._taking = threading.Lock()
        self._pool = ProcessPoolExecutor(count, server(), _begin, (open_fill,))

    def batch(self, shape: tuple[int, ...]) -> DecodingBatch:
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

    def cancel(self) -> None:
        _cancel(self._futures)

    def submit(self, *work: Any) -> Callable[[], Faults]:
        """Let a worker decode."""

        def guarded(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except BrokenProcessPool:
                raise Broken(
                    "a process that decodes images was killed; if memory is short, write a smaller on.loader_workers"
                ) from None

        future: Future[Faults] = guarded(lambda: self._pool.submit(_decode, *work))
        self._futures.add(future)
        return lambda: list(guarded(future.result))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _WorkerProcess(ForkServerProcess):
    """A process that does not import the program that is running: a script may train when it is imported."""

    _starting = threading.Lock()

    @classmethod
    def _Popen(cls, process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        with cls._starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return ForkServerProcess._Popen(process)
            finally:
                sys.modules["__main__"] = main


class _WorkerContext(ForkServerContext):
    Process = _WorkerProcess


def server() -> ForkServerContext:
    """The process that worker processes are forked from; it ignores the signals that ask a run to stop."""
    context = _WorkerContext()
    context.set_forkserver_preload(["paceline.data.load.files"])  # so that torch is loaded once, and shared
    resource_tracker.ensure_running()  # if it began in the call below, it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:  # what it begins with blocked stays so, and one that is meant for this process comes a moment later
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


_serials = itertools.count()
"""Distinguish a new memory from an earlier one with the same path."""


class _Shared:
    """Memory for a batch that workers write to; for a CUDA device it is pinned."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.serial = next(_serials)
        self._memory = Memory(self.size)
        self.handle = self._memory.handle
        self.memory = np.frombuffer(self._memory.mapped, np.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied:
            torch.cuda.cudart().cudaHostRegister(self.memory.ctypes.data, self.size, 0)

    def to_device(self, images: UInt8s, device: torch.device) -> Tensor:
        """A copy on the device of images in this memory."""
        if self._copied is None:
            return torch.from_numpy(images).clone()
        copied = torch.from_numpy(images).to(device, non_blocking=True)
        self._copied.record()
        return copied

    def close(self) -> None:
        """Free the memory."""
        if self._copied:
            self._copied.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
        self._memory.close()

    def wait(self) -> None:
        """Wait until the last copy from this memory is done."""
        if self._copied:
            self._copied.synchronize()


class _ProcessBatch:
    def __init__(self, processes: Processes, shared: _Shared, shape: tuple[int, ...]) -> None:
        self._processes, self._shared, self._shape = processes, shared, shape
        self.images: UInt8s = shared.memory[: int(np.prod(shape))].reshape(shape)

    def decode(self, chunk: Chunk, first: int) -> Callable[[], Faults]:
        shared = self._shared
        return self._processes.submit(chunk, shared.handle, shared.serial, shared.size, self._shape, first)

    def to_device(self) -> Tensor:
        copied = self._shared.to_device(self.images, self._processes.device)
        self._processes.free.append(self._shared)
        return copied


def _cancel(futures: WeakSet[Future[Faults]]) -> None:
    for future in list(futures):
        future.cancel()


_fill: Fill
_mapped: dict[str, tuple[int, UInt8s]] = {}


def start_worker() -> None:
    """What every worker process does first."""
    for stop in STOPS:  # they are sent to all processes of a run, and the replica decides when its workers end
        signal.signal(stop, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_replica, daemon=True).start()
    torch.set_num_threads(1)


def _begin(open_fill: Callable[[], Fill]) -> None:
    start_worker()
    global _fill  # noqa: PLW0603 - a process works for one plan
    try:
        _fill = open_fill()
    except Exception as fault:  # noqa: BLE001 - from here it would look as if the process had been killed
        _fill = _failing(fault)


def _failing(fault: Exception) -> Fill:
    """Raises a fault for whoever asks to decode a chunk."""

    def fill(*_: object) -> Faults:
        raise fault

    return fill


def _end_with_the_replica() -> None:
    replica = multiprocessing.parent_process()
    assert replica is not None
    connection.wait([replica.sentinel])
    os._exit(1)


def _decode(chunk: Chunk, handle: Handle, serial: int, size: int, shape: tuple[int, ...], first: int) -> Faults:
    path = handle.path
    if path not in _mapped or _mapped[path][0] != serial:
        _mapped[path] = serial, np.frombuffer(Memory(size, handle).mapped, np.uint8)
    batch = _mapped[path][1][: int(np.prod(shape))].reshape(shape)
    return _fill(chunk, batch[first : first + len(chunk.indices)])
