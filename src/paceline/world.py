"""Processes and what they say to each other; the only user of torch.distributed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.errors import INTERRUPTED, Broken
from paceline.launch import OURS, Launch
from paceline.planning import Plan
from paceline.settings.placement import shared_keys


@dataclass
class World:
    """This replica among all: alone unless a launcher started several."""

    device: torch.device
    replica: int = 0
    replicas: int = 1
    store: Any = None
    timeout: timedelta | None = None

    @property
    def first(self) -> bool:
        """Whether this is the replica that writes and speaks."""
        return self.replica == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up `values` over all replicas, in place."""
        if self.replicas > 1:
            self._together(lambda: dist.all_reduce(values))
        return values

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Give every replica the first one's values, in place."""
        if self.replicas > 1:
            for tensor in tensors:
                whole = tensor.contiguous()
                self._together(lambda row=whole: dist.broadcast(row, 0))
                tensor.copy_(whole)

    def agree(self, numbers: list[int]) -> list[int]:
        """The first replica's list of whole numbers, on every replica."""
        if self.replicas == 1:
            return numbers
        count = torch.tensor([len(numbers)], device=self.device)
        self.spread([count])
        listed = torch.zeros(int(count), dtype=torch.int64, device=self.device)
        if self.first:
            listed.copy_(torch.tensor(numbers))
        self.spread([listed])
        return [int(number) for number in listed.tolist()]

    def alike(self, number: Tensor) -> bool:
        """Whether a number on the device is the same on every replica, which all learn."""
        if self.replicas == 1:
            return True
        given = number.clone()
        self.spread([given])
        return float(self.sum((given != number).to(torch.float32))) == 0

    def neighbors(self, count: int) -> Circle | None:
        """The `count` neighboring replicas that share norm groups with this one; every replica must ask."""
        if count == 1:
            return None
        groups = [list(range(start, start + count)) for start in range(0, self.replicas, count)]
        mine = [dist.new_group(ranks, timeout=self.timeout) for ranks in groups][self.replica // count]
        return Circle(count, mine, self)

    def wait_for_all(self) -> None:
        """Go on when every replica has come here."""
        if self.replicas > 1:
            self._together(dist.barrier)

    def close(self) -> None:
        """Leave the group."""
        if self.replicas > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _together(self, work: Any) -> None:
        try:
            work()
        except RuntimeError as fault:
            detail = re.sub(r"^\[[^\]]*\]\s*", "", str(fault).splitlines()[0])[:100]
            raise Broken(f"{self._missing()} ({detail}); what was saved is whole") from None

    def _missing(self) -> str:
        """After a failed exchange: who does not answer a roll call."""
        try:
            self.store.set(f"roll/{self.replica}", "here")
            end = time.monotonic() + 5
            absent = list(range(self.replicas))
            while absent and time.monotonic() < end:
                absent = [r for r in absent if not self.store.check([f"roll/{r}"])]
                time.sleep(0.1)
        except RuntimeError:
            return "the replicas lost each other"
        names = ", ".join(map(str, absent))
        return f"replica {names} stopped answering" if absent else "an exchange between replicas failed"


@dataclass
class Circle:
    """Neighboring replicas that share norm groups."""

    count: int
    group: Any
    world: World

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's values, stacked in replica order."""
        result = [torch.empty_like(values) for _ in range(self.count)]
        self.world._together(lambda: dist.all_gather(result, values, group=self.group))
        return torch.stack(result)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of everybody's values."""
        self.world._together(lambda: dist.all_reduce(values, group=self.group))
        return values


def join(plan: Plan, launch: Launch | None) -> World:
    """Take this process's place: its device, and its group when a launcher started several."""
    if os.environ.get(OURS):
        _die_with_parent()
    kind = plan.placement.device
    _check_device(kind)
    device = torch.device(kind)
    if kind == "cuda":
        # A launcher may show each process its own accelerator only.
        device = torch.device("cuda", (launch.local_rank if launch else 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if launch is None or launch.count == 1:
        return World(device)
    timeout = timedelta(seconds=plan.placement.timeout)
    store = _meet(launch, timeout, _digest(plan))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=launch.rank, world_size=launch.count, timeout=timeout
    )
    return World(device, launch.rank, launch.count, store, timeout)


def _digest(plan: Plan) -> str:
    """What all replicas must agree on: the recipe, how its steps are cut, and their arithmetic."""
    shared = plan.placement.model_dump_json(include=shared_keys())
    return hashlib.sha256((plan.recipe.model_dump_json() + shared).encode()).hexdigest()


def _meet(launch: Launch, timeout: timedelta, digest: str) -> Any:
    """The store all replicas share, once everyone is there with the same plan; who is missing or differs is named."""
    host = f"{launch.address}:{launch.port}"
    opens = launch.rank == 0 and not launch.store_is_there
    try:
        base = TCPStore(launch.address, launch.port, None, opens, timeout, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as fault:
        raise Broken(f"no meeting place at {host}: {str(fault).splitlines()[0][:160]}") from None
    store = PrefixStore(f"paceline/{launch.attempt}", base)
    store.set(f"here/{launch.rank}", digest)
    try:
        store.wait([f"here/{rank}" for rank in range(launch.count)], timeout)
    except (RuntimeError, dist.DistError):
        absent = [str(rank) for rank in range(launch.count) if not store.check([f"here/{rank}"])]
        raise Broken(
            f"replica {', '.join(absent)} did not come to {host} within {timeout.total_seconds():g} s"
        ) from None
    other = [str(rank) for rank in range(launch.count) if store.get(f"here/{rank}").decode() != digest]
    if other:
        raise Broken(f"replica {', '.join(other)} has another plan than replica {launch.rank}; give all the same words")
    return store


def _check_device(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        raise Broken("torch cannot use a CUDA device here; write on.device=cpu, or install a CUDA build of torch")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Broken("torch cannot use an Apple GPU here; write on.device=cpu")


def _die_with_parent() -> None:
    """A replica whose launcher was killed must not train on alone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start_replicas(count: int, words: Sequence[str]) -> int:
    """Start `count` processes of this same command through torch's elastic launcher; returns the exit status."""
    import logging  # noqa: PLC0415 - only the launching process needs these

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    logging.disable(logging.ERROR)  # the launcher's own notes on signals and dead workers; ours are one line each
    told = Path(tempfile.mkdtemp(prefix="paceline-"))
    os.environ[OURS] = str(told)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")  # time to finish the step and save
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(told)),
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "paceline", *words)  # -P: not from the user's folder
    except SignalException:
        if (told / "interrupted").exists():
            return INTERRUPTED
        raise Broken("stopped by a signal before the replicas could save; what was saved before is whole") from None
    except ChildFailedError as fault:
        rank, failure = fault.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise Broken(
                f"replica {rank} was killed by {name}; the others were stopped, and what was saved is whole"
            ) from None
        lines = [path.read_text() for path in (told / str(rank), told / "0") if path.is_file()]
        raise _Told(lines[0] if lines else f"replica {rank} failed", failure.exitcode) from None
    else:
        return INTERRUPTED if (told / "interrupted").exists() else 0
    finally:
        shutil.rmtree(told, ignore_errors=True)


class _Told(Broken):
    """What a replica said before it ended, with its exit status."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status
