"""Processes and collectives: the only user of torch.distributed."""

from __future__ import annotations

import pickle
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.agreement import agreement
from paceline.errors import INTERRUPTED, Broken, PlanError
from paceline.launch import Launch
from paceline.machine import NO_CUDA
from paceline.planning import Plan
from paceline.rendezvous import SHARED, die_with_launcher, meet
from paceline.starting import answered_signals

T = TypeVar("T")
_ROLL = 5.0
"""Seconds that processes have to answer after a failed collective."""
_LEAVES_AFTER = 10.0
"""Seconds that a process without work has to leave, and leaves the replicas to end after a signal."""


@dataclass
class World:
    """This process among all processes of the run; alone unless a launcher started several.

    Each replica has as many processes as it has stages, and these are neighbors.
    """

    device: torch.device
    replica: int = 0
    replicas: int = 1
    store: Any = None
    timeout: timedelta | None = None
    host_group: Any = None
    """All processes over gloo, for small messages that must not wait for the device."""
    spare: int = 0
    """How many processes more a launcher has started, which wait for the end."""
    stage: int = 0
    stages: int = 1
    replica_group: Any = None
    """This stage of all replicas; None is all processes."""
    stage_group: Any = None
    """All stages of this replica."""

    @property
    def process(self) -> int:
        """The number of this process."""
        return self.replica * self.stages + self.stage

    @property
    def processes(self) -> int:
        """Processes of all replicas together."""
        return self.replicas * self.stages

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.process == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place."""
        if self.processes > 1:
            self.checked(dist.all_reduce, values)
        return values

    def all_reduce_async(self, values: Tensor, on_host: bool = False) -> Work:
        """Start to sum `values` over all replicas of this stage, in place; `on_host` over all processes, where the
        device has no part in it."""
        group = self.host_group if on_host else self.replica_group
        return Work(self.checked(dist.all_reduce, values, group=group, async_op=True), self)

    def over_stages(self, values: Tensor) -> Tensor:
        """Sum `values` over the stages of this replica, in place."""
        if self.stages > 1:
            self.checked(dist.all_reduce, values, group=self.stage_group)
        return values

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copy one replica's values to every replica, stage by stage, in place; the tensors may be on the host."""
        if self.replicas > 1:
            for tensor in tensors:
                row = tensor.to(self.device).contiguous()
                self.checked(dist.broadcast, row, group=self.replica_group, group_src=source)
                tensor.copy_(row)

    def exchange(self, pieces: Sequence[tuple[Tensor, int]]) -> None:
        """Copy each tensor, which lies in one piece on the device, from the replica beside it to all, in place."""
        group, send = self.replica_group, dist.broadcast
        works = [
            Work(self.checked(send, row, group=group, group_src=source, async_op=True), self) for row, source in pieces
        ]
        for work in works:
            work.wait()

    def broadcast_object(self, value: T) -> T:
        """Return the first process's value, which can be anything that pickles, on every process."""
        if self.processes == 1:
            return value
        box = [value]
        self.checked(dist.broadcast_object_list, box, 0, group=self.host_group)
        return box[0]

    def gather_stages(self, value: T) -> list[T]:
        """Return the values of the first replica's stages, in order, on the first process, and elsewhere nothing."""
        if self.stages == 1:
            return [value] if self.first else []
        values: list[Any] = [None] * self.processes
        own = value if self.replica == 0 else None
        self.checked(dist.gather_object, own, values if self.first else None, 0, group=self.host_group)
        return values[: self.stages] if self.first else []

    def from_stage(self, value: T, stage: int) -> T:
        """Return the value of one stage of this replica, which can be anything that pickles, on every stage of it."""
        box = [value]
        self.checked(dist.broadcast_object_list, box, group=self.stage_group, group_src=stage)
        return box[0]

    def send(self, values: Tensor, stage: int) -> None:
        """Send a tensor to another stage of this replica, which waits for it."""
        self.checked(dist.send, values.contiguous(), group=self.stage_group, group_dst=stage)

    def receive(self, values: Tensor, stage: int) -> Tensor:
        """Receive a tensor from another stage of this replica, in place."""
        self.checked(dist.recv, values, group=self.stage_group, group_src=stage)
        return values

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes, which can be anything that pickles, in their order."""
        if self.processes == 1:
            return [value]
        values: list[Any] = [None] * self.processes
        self.checked(dist.all_gather_object, values, value, group=self.host_group)
        return values

    def first_on_host(self, name: str, value: T) -> T:
        """Return the value of the replica of this host that came here first; on each, it can be anything that pickles.

        The first stage of every replica must call it, and once for each name.
        """
        if self.replicas == 1:
            return value
        key = f"{name}/{_this_host()}"
        if self.store.add(f"{key}/came", 1) == 1:
            self.store.set(key, pickle.dumps(value))
            return value
        first: T = pickle.loads(self.checked(self.store.get, key))
        return first

    def all_equal(self, number: Tensor) -> bool:
        """Return on every replica whether a number on the device is the same on all of them."""
        if self.replicas == 1:
            return True
        first = number.clone()
        self.broadcast([first])
        return float(self.all_reduce((first != number).to(torch.float32))) == 0

    def subgroup(self, count: int) -> NormGroup | None:
        """Return this replica's group of `count` neighbors, or None if that is itself; every replica must call it."""
        if count == 1:
            return None
        starts = range(0, self.replicas, count)
        ranks = [
            [replica * self.stages + stage for replica in range(start, start + count)]
            for stage in range(self.stages)
            for start in starts
        ]
        groups = [dist.new_group(neighbors, timeout=self.timeout) for neighbors in ranks]
        return NormGroup(count, groups[self.stage * len(starts) + self.replica // count], self)

    def barrier(self) -> None:
        """Wait until every process has come here."""
        if self.processes > 1:
            self.checked(dist.barrier, group=self.host_group)

    def close(self) -> None:
        """Leave the process group."""
        if self.first and self.spare:
            self.store.set("ended", "")
            with suppress(RuntimeError):  # one that has gone already
                ranks = range(self.processes, self.processes + self.spare)
                self.store.wait([f"left/{rank}" for rank in ranks], timedelta(seconds=_LEAVES_AFTER))
        if self.processes > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def checked(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a collective; if it fails, say which replica is missing."""
        try:
            return collective(*arguments, **options)
        except RuntimeError as fault:
            detail = re.sub(r"^\[[^\]]*\]\s*", "", str(fault).splitlines()[0])[:100]
            raise Broken(f"{self._missing()} ({detail}); what was saved is whole") from None

    def _missing(self) -> str:
        """Call the roll after a failed collective and say who does not answer."""
        called: list[list[int]] = []

        def call() -> None:
            with suppress(RuntimeError):
                called.append(self._absent())

        roll = threading.Thread(target=call, daemon=True)  # over a link that is cut the store is waited for without end
        roll.start()
        roll.join(2 * _ROLL)
        if not called:
            return "the replicas lost each other"
        names = ", ".join(map(str, called[0]))
        who = "replica" if self.stages == 1 else "process"
        return f"{who} {names} stopped answering" if names else "a collective failed"

    def _absent(self) -> list[int]:
        """The processes that do not come to the store."""
        self.store.set(f"roll/{self.process}", "here")
        end, absent = time.monotonic() + _ROLL, list(range(self.processes))
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not self.store.check([f"roll/{rank}"])]
            time.sleep(0.1)
        return absent


@dataclass(frozen=True)
class Work:
    """A collective that has been started."""

    handle: Any
    world: World

    def wait(self) -> None:
        """Wait until it is done: the host where the values are in its memory, else the device."""
        self.world.checked(self.handle.wait)


@dataclass
class NormGroup:
    """Neighboring replicas that share norm groups."""

    count: int
    group: Any
    world: World

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all neighbors, stacked in replica order."""
        rows = [torch.empty_like(values) for _ in range(self.count)]
        self.world.checked(dist.all_gather, rows, values, group=self.group)
        return torch.stack(rows)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the neighbors, in place."""
        self.world.checked(dist.all_reduce, values, group=self.group)
        return values


def init_world(plan: Plan, launch: Launch | None, data_digest: str = "") -> World:
    """Choose this process's device, and join the other replicas if a launcher started several.

    They must have the same code, settings and images; `data_digest` stands for the latter.
    """
    die_with_launcher()
    kind = plan.placement.device
    check_device(kind)
    device = torch.device(kind)
    if kind == "cuda":
        # A launcher may show each process its own accelerator only.
        device = torch.device("cuda", (launch.local_rank if launch else 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if launch is None or launch.count == 1:
        return World(device)
    timeout = timedelta(seconds=plan.placement.timeout)
    accelerator = str(torch.cuda.get_device_properties(device).uuid) if kind == "cuda" else None
    store = meet(launch, timeout, agreement(plan, data_digest), accelerator)
    spare = launch.count - plan.processes
    if plan.processes == 1:
        return World(device, store=store, timeout=timeout, spare=spare)
    backend = "nccl" if accelerator and not store.check([SHARED]) else "gloo"
    if backend == "gloo" and kind == "cuda" and plan.stages > 1:
        raise PlanError("several processes use one accelerator, and a stage of a pipeline needs one of its own")
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=plan.processes, timeout=timeout)
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    world = World(device, launch.rank, plan.processes, store, timeout, host_group, spare)
    return world if plan.stages == 1 else _staged(world, plan.stages)


def stand_by(plan: Plan, launch: Launch, data_digest: str) -> int:
    """Wait until the replicas have ended, in a process that the plan has no work for; gives the exit status.

    It stays, so that its launcher can start all of them again. A signal is for the replicas, which save: this process
    only leaves if they have not ended some seconds later.
    """
    die_with_launcher()
    heard: list[float] = []
    for number in answered_signals():
        signal.signal(number, lambda *_: heard.append(time.monotonic()))
    store = meet(launch, timedelta(seconds=plan.placement.timeout), agreement(plan, data_digest))
    try:
        while not store.check(["ended"]):
            if heard and time.monotonic() > heard[0] + _LEAVES_AFTER:
                return INTERRUPTED
            time.sleep(0.2)
        store.set(f"left/{launch.rank}", "")
    except (RuntimeError, dist.DistError):
        raise Broken("the replicas are gone; what was saved is whole") from None
    return 0


def _staged(world: World, stages: int) -> World:
    """The same processes, but each one a stage of its replica; every process must call it."""
    numbers = range(world.replicas)
    groups = [[n for n in numbers if n % stages == stage] for stage in range(stages)]
    groups += [list(numbers[start : start + stages]) for start in numbers[::stages]]
    mine = [dist.new_group(group, timeout=world.timeout) for group in groups]
    replica, stage = divmod(world.replica, stages)
    return replace(
        world, replica=replica, replicas=world.replicas // stages, stage=stage, stages=stages,
        replica_group=mine[stage], stage_group=mine[stages + replica],
    )  # fmt: skip


def _this_host() -> str:
    """What replicas have in common that can open each other's memory: a machine, and in containers its processes."""
    processes = Path("/proc/self/ns/pid")
    return f"{platform.node()} {processes.readlink() if processes.is_symlink() else ''}"


def check_device(kind: str) -> None:
    """Refuse a kind of device that torch does not have here."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError(NO_CUDA)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise PlanError("torch cannot use an Apple GPU here; write on.device=cpu")
