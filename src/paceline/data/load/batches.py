"""What a loader gives to the loop, and how it prepares that ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.augment.pipeline import Draws, draw_each
from paceline.device import pinned
from paceline.numpy_types import Int64s
from paceline.planning import Plan

Item = TypeVar("Item")
AHEAD = 4
"""Items that are prepared before they are needed."""


@dataclass(frozen=True)
class MicroBatch:
    """Images of one forward pass on the device: 8-bit, channels last in memory; only the first `count` are real."""

    images: Tensor
    labels: Tensor
    count: int
    positions: Tensor | None = None
    """Where training images stand in the endless list (int64)."""
    draws: Draws | None = None
    """The numbers drawn for the augmentation of training images."""
    indices: Tensor | None = None
    """Which validation images these are, by number (int64)."""


StepBatches = Generator[list[MicroBatch], None, None]
"""A replica's micro-batches of each step; to be closed, so that what is prepared ahead ends."""


@dataclass(frozen=True)
class HostInputs:
    """What the host prepares for a training micro-batch beside its images, in memory that the device can copy from."""

    positions: Tensor
    draws: Draws

    def batch(self, images: Tensor, labels: Tensor) -> MicroBatch:
        """The micro-batch of images and labels that are on the device, without waiting for the copies."""
        positions = self.positions.to(images.device, non_blocking=True)
        return MicroBatch(images, labels, len(images), positions, self.draws.to(images.device))


def host_inputs(plan: Plan, batches: list[Int64s], device: torch.device) -> list[HostInputs]:
    """The inputs of micro-batches, by their positions in the endless list."""
    draws = draw_each(plan, batches, device)
    return [HostInputs(pinned(positions, device), one) for positions, one in zip(batches, draws, strict=True)]


def ahead(items: Iterator[Item], depth: int = AHEAD) -> Generator[Item, None, None]:
    """The same items, up to `depth` of them computed in advance by a thread, whose faults are raised here."""
    results: queue.Queue[Future[Item]] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(result: Future[Item]) -> None:
        while not stopped.is_set():
            try:
                results.put(result, timeout=0.1)
                break
            except queue.Full:
                continue

    def work() -> None:
        while not stopped.is_set():
            result = Future[Item]()
            try:
                result.set_result(next(items))
            except BaseException as fault:  # noqa: BLE001 - raised again in the thread that asks, the end included
                result.set_exception(fault)
            offer(result)
            if result.exception() is not None:
                return

    thread = threading.Thread(target=work, name="images ahead", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = results.get().result()
            except StopIteration:
                return
            yield item
    finally:
        stopped.set()
        thread.join()  # a thread still inside a library when the interpreter ends would abort the process


def fill_up(indices: Int64s, size: int) -> Int64s:
    """Indices of images, filled up to `size` with the first image."""
    return np.concatenate([indices, np.zeros(size - len(indices), np.int64)])
