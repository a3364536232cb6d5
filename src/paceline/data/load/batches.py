"""What a loader gives to the loop, and how it prepares that ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Item = TypeVar("Item")
AHEAD = 4
"""Items that are prepared before they are needed."""


@dataclass(frozen=True)
class MicroBatch:
    """Images of one forward pass on the device: 8-bit, channels last in memory; only the first `count` are real."""

    images: Tensor
    labels: Tensor
    count: int
    first: int = 0
    """Where in the endless list a training batch begins."""


Shares = Generator[list[MicroBatch], None, None]
"""A replica's micro-batches of each step; to be closed, so that what is prepared ahead ends."""


class Loader(Protocol):
    """Where a replica gets its images."""

    def training(self, start: int) -> Shares:
        """This replica's micro-batches of each step, beginning with step `start`, without end."""
        ...

    def validation(self) -> Generator[MicroBatch, None, None]:
        """This replica's part of the validation images."""
        ...


def ahead(items: Iterator[Item], depth: int = AHEAD) -> Generator[Item, None, None]:
    """The same items, up to `depth` of them made before they are asked for by a thread, whose faults come through."""
    made: queue.Queue[Callable[[], Item]] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(get: Callable[[], Item]) -> None:
        while not stopped.is_set():
            try:
                made.put(get, timeout=0.1)
                break
            except queue.Full:
                continue

    def work() -> None:
        while not stopped.is_set():
            try:
                item = next(items)
            except BaseException as fault:  # noqa: BLE001 - raised again in the thread that asks, the end included
                offer(partial(_raise, fault))
                return
            offer(partial(_same, item))

    thread = threading.Thread(target=work, name="images ahead", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = made.get()()
            except StopIteration:
                return
            yield item
    finally:
        stopped.set()
        thread.join()  # a thread still inside a library when the interpreter ends would abort the process


def _same(item: Item) -> Item:
    return item


def _raise(fault: BaseException) -> NoReturn:
    raise fault


def endless(prepare: Callable[[int], Item], start: int) -> Iterator[Item]:
    """What is prepared for start, start + 1, and so on."""
    while True:
        yield prepare(start)
        start += 1


def filled_up(numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Numbers of images, filled up with the first image."""
    return np.concatenate([numbers, np.zeros(size - len(numbers), np.int64)])


def pinned(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Values in memory that a CUDA device can copy from while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor
