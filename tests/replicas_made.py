"""Replicas that are threads of one process, for tests of what replicas do together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


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
