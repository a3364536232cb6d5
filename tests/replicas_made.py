"""Replicas that are threads of one process, for tests of what replicas do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.world import Work, World

T = TypeVar("T")


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(replica)` side by side, as replicas do."""
    faults: list[BaseException] = []

    def guarded(replica: int) -> None:
        try:
            work(replica)
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [threading.Thread(target=guarded, args=(replica,)) for replica in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults


class Circle:
    """Neighbors that are threads: what each brings is put together when all have come."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=30)
        self.brought: list[Tensor] = [torch.empty(0)] * count
        self.first: Any = None

    def seat(self, replica: int) -> Seat:
        return Seat(self, replica)

    def bring(self, replica: int, values: Tensor) -> Tensor:
        self.brought[replica] = values.clone()
        self.barrier.wait()
        everyone = torch.stack(self.brought)
        self.barrier.wait()
        return everyone


class Seat:
    """One replica's place in a circle."""

    def __init__(self, circle: Circle, replica: int) -> None:
        self.circle, self.replica, self.count = circle, replica, circle.count

    def all_gather(self, values: Tensor) -> Tensor:
        return self.circle.bring(self.replica, values)

    def all_reduce(self, values: Tensor) -> Tensor:
        return self.circle.bring(self.replica, values).sum(0)


class ThreadWorld(World):
    """One of several replicas that are threads; their tensors go through a circle."""

    def __init__(self, circle: Circle, replica: int) -> None:
        super().__init__(torch.device("cpu"), replica, circle.count)
        self._circle = circle

    def all_reduce_async(self, values: Tensor, on_host: bool = False) -> Work:
        values.copy_(self._circle.bring(self.replica, values).sum(0))
        return Work(SimpleNamespace(wait=lambda: None), self)

    def all_reduce(self, values: Tensor) -> Tensor:
        self.all_reduce_async(values)
        return values

    def broadcast_object(self, value: T) -> T:
        if self.first:
            self._circle.first = value
        self._circle.barrier.wait()
        first: T = self._circle.first
        self._circle.barrier.wait()
        return first

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._circle.bring(self.replica, tensor)[source])

    def exchange(self, pieces: Sequence[tuple[Tensor, int]]) -> None:
        for row, source in pieces:
            self.broadcast([row], source)
