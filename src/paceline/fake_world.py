"""A place among replicas that are played, on torch's fake process group; with `world`, a user of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.planning import Plan
from paceline.world import World, check_device


class Rehearsal(World):
    """A world whose other replicas are played, and which counts what this one sends.

    They send what this one does: sums stay as they are, and every row of a gather is this one's.
    """

    sent: dict[tuple[str, int, str, str], tuple[int, int]]
    """Of each kind of collective: how often it was called, and the bytes that this replica gave to it."""

    def checked(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        for tensor in [each for each in arguments if isinstance(each, Tensor)]:
            group = options.get("group")
            place = "host" if group is not None and group is self.host_group else "device"
            among = dist.get_world_size(group)
            key = (collective.__name__, among, place, str(tensor.dtype).removeprefix("torch."))
            calls, size = self.sent.get(key, (0, 0))
            self.sent[key] = calls + 1, size + tensor.nbytes
        return super().checked(collective, *arguments, **options)


@contextmanager
def rehearsal_world(plan: Plan, rank: int) -> Iterator[Rehearsal]:
    """A place among all replicas of a plan in this process alone, on torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - slow to import

    check_device(plan.placement.device)
    device = torch.device("cuda", 0) if plan.placement.device == "cuda" else torch.device(plan.placement.device)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.replicas)
    try:
        world = Rehearsal(device, rank, plan.replicas, timeout=None, host_group=dist.new_group(backend="fake"))
        world.sent = {}
        yield world
    finally:
        dist.destroy_process_group()
