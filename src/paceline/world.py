"""Processes and collectives: the only user of torch.distributed."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pickle
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.errors import INTERRUPTED, Broken, PlanError
from paceline.launch import MESSAGES_FOLDER, Launch
from paceline.planning import Plan
from paceline.settings.placement import shared_keys

T = TypeVar("T")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that Paceline's own launcher hands on to the replicas."""
_LEAVES_AFTER = 10.0
"""Seconds that a process without work has to leave, and leaves the replicas to end after a signal."""


@dataclass
class World:
    """This replica among all replicas of the run; alone unless a launcher started several."""

    device: torch.device
    replica: int = 0
    replicas: int = 1
    store: Any = None
    timeout: timedelta | None = None
    host_group: Any = None
    """All replicas over gloo, for small messages that must not wait for the device."""
    spare: int = 0
    """How many processes more a launcher has started, which wait for the end."""

    @property
    def first(self) -> bool:
        """Whether this is the replica that writes files and prints."""
        return self.replica == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over all replicas, in place."""
        if self.replicas > 1:
            self._checked(dist.all_reduce, values)
        return values

    def all_reduce_async(self, values: Tensor, on_host: bool = False) -> Work:
        """Start to sum `values` over all replicas, in place; `on_host` if the device has no part in it."""
        group = self.host_group if on_host else None
        return Work(self._checked(dist.all_reduce, values, group=group, async_op=True), self)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first replica's values to every replica, in place."""
        if self.replicas > 1:
            for tensor in tensors:
                row = tensor.contiguous()
                self._checked(dist.broadcast, row, 0)
                tensor.copy_(row)

    def broadcast_object(self, value: T) -> T:
        """Return the first replica's value, which can be anything that pickles, on every replica."""
        if self.replicas == 1:
            return value
        box = [value]
        self._checked(dist.broadcast_object_list, box, 0, group=self.host_group)
        return box[0]

    def first_on_host(self, name: str, value: T) -> T:
        """Return the value of the replica of this host that came here first; on each, it can be anything that pickles.

        Every replica must call it, and once for each name.
        """
        if self.replicas == 1:
            return value
        key = f"{name}/{_this_host()}"
        if self.store.add(f"{key}/came", 1) == 1:
            self.store.set(key, pickle.dumps(value))
            return value
        first: T = pickle.loads(self._checked(self.store.get, key))
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
        ranks = [list(range(start, start + count)) for start in range(0, self.replicas, count)]
        groups = [dist.new_group(neighbors, timeout=self.timeout) for neighbors in ranks]
        return NormGroup(count, groups[self.replica // count], self)

    def barrier(self) -> None:
        """Wait until every replica has come here."""
        if self.replicas > 1:
            self._checked(dist.barrier, group=self.host_group)

    def close(self) -> None:
        """Leave the process group."""
        if self.first and self.spare:
            self.store.set("ended", "")
            with suppress(RuntimeError):  # one that has gone already
                ranks = range(self.replicas, self.replicas + self.spare)
                self.store.wait([f"left/{rank}" for rank in ranks], timedelta(seconds=_LEAVES_AFTER))
        if self.replicas > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _checked(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a collective; if it fails, say which replica is missing."""
        try:
            return collective(*arguments, **options)
        except RuntimeError as fault:
            detail = re.sub(r"^\[[^\]]*\]\s*", "", str(fault).splitlines()[0])[:100]
            raise Broken(f"{self._missing()} ({detail}); what was saved is whole") from None

    def _missing(self) -> str:
        """Call the roll after a failed collective and say who does not answer."""
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
        return f"replica {names} stopped answering" if absent else "a collective failed"


@dataclass(frozen=True)
class Work:
    """A collective that has been started."""

    handle: Any
    world: World

    def wait(self) -> None:
        """Wait until it is done: the host where the values are in its memory, else the device."""
        self.world._checked(self.handle.wait)


@dataclass
class NormGroup:
    """Neighboring replicas that share norm groups."""

    count: int
    group: Any
    world: World

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all neighbors, stacked in replica order."""
        rows = [torch.empty_like(values) for _ in range(self.count)]
        self.world._checked(dist.all_gather, rows, values, group=self.group)
        return torch.stack(rows)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the neighbors, in place."""
        self.world._checked(dist.all_reduce, values, group=self.group)
        return values


def init_world(plan: Plan, launch: Launch | None) -> World:
    """Choose this process's device, and join the other replicas if a launcher started several."""
    _die_with_launcher()
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
    store = _rendezvous(launch, timeout, _digest(plan))
    spare = launch.count - plan.replicas
    if plan.replicas == 1:
        return World(device, store=store, timeout=timeout, spare=spare)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=plan.replicas, timeout=timeout)
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    return World(device, launch.rank, plan.replicas, store, timeout, host_group, spare)


def stand_by(plan: Plan, launch: Launch) -> int:
    """Wait until the replicas have ended, in a process that the plan has no work for; gives the exit status.

    It stays, so that its launcher can start all of them again. A signal is for the replicas, which save: this process
    only leaves if they have not ended some seconds later.
    """
    _die_with_launcher()
    heard: list[float] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: heard.append(time.monotonic()))
    store = _rendezvous(launch, timedelta(seconds=plan.placement.timeout), _digest(plan))
    try:
        while not store.check(["ended"]):
            if heard and time.monotonic() > heard[0] + _LEAVES_AFTER:
                return INTERRUPTED
            time.sleep(0.2)
        store.set(f"left/{launch.rank}", "")
    except (RuntimeError, dist.DistError):
        raise Broken("the replicas are gone; what was saved is whole") from None
    return 0


def _digest(plan: Plan) -> str:
    """Hash what must be the same on all replicas: the recipe, how its steps are cut, and the arithmetic."""
    placement = plan.placement.model_dump_json(include=shared_keys())
    return hashlib.sha256((plan.recipe.model_dump_json() + placement).encode()).hexdigest()


def _rendezvous(launch: Launch, timeout: timedelta, digest: str) -> Any:
    """Return the store of all replicas once each has come with the same plan; name those that are missing or differ."""
    host = f"{launch.address}:{launch.port}"
    serves = launch.rank == 0 and not launch.store_is_there
    try:
        base = TCPStore(launch.address, launch.port, None, serves, timeout, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as fault:
        raise Broken(f"cannot reach the rendezvous at {host}: {str(fault).splitlines()[0][:160]}") from None
    store = PrefixStore(f"paceline/{launch.attempt}", base)
    store.set(f"here/{launch.rank}", digest)
    ranks = range(launch.count)
    try:
        store.wait([f"here/{rank}" for rank in ranks], timeout)
    except (RuntimeError, dist.DistError):
        absent = ", ".join(str(rank) for rank in ranks if not store.check([f"here/{rank}"]))
        seconds = f"{timeout.total_seconds():g} s"
        raise Broken(f"replica {absent} did not reach the rendezvous at {host} within {seconds}") from None
    other = ", ".join(str(rank) for rank in ranks if store.get(f"here/{rank}").decode() != digest)
    if other:
        raise Broken(
            f"replica {other} has a different plan from replica {launch.rank}; "
            "start every process with the same arguments"
        )
    return store


def _this_host() -> str:
    """What replicas have in common that can open each other's memory: a machine, and in containers its processes."""
    processes = Path("/proc/self/ns/pid")
    return f"{platform.node()} {processes.readlink() if processes.is_symlink() else ''}"


def _check_device(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("torch cannot use a CUDA device here; write on.device=cpu, or install a CUDA build of torch")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise PlanError("torch cannot use an Apple GPU here; write on.device=cpu")


def _die_with_launcher() -> None:
    """A replica whose launcher, torchrun or Paceline's own, was killed must not train on alone, nor keep the run folder
    from those that come after it (Linux)."""
    if sys.platform == "linux" and (os.environ.get(MESSAGES_FOLDER) or "TORCHELASTIC_RUN_ID" in os.environ):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start_replicas(count: int, module_args: Sequence[str]) -> int:
    """Run `python -m MODULE_ARGS` in `count` processes under torch's elastic launcher, and return the exit status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415 - slow to import
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
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
        signals_to_handle=",".join(number.name for number in _PASSED_ON),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        with _launching(folder):
            elastic_launch(config, sys.executable)("-P", "-m", *module_args)  # -P: not from the user's folder
        return INTERRUPTED if (folder / "interrupted").exists() else 0
    except SignalException:
        if (folder / "interrupted").exists():
            return INTERRUPTED
        raise Broken("stopped by a signal before the replicas could save; what was saved before is whole") from None
    except ChildFailedError as fault:
        rank, failure = fault.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise Broken(
                f"replica {rank} was killed by {name}; the others were stopped, and what was saved is whole"
            ) from None
        messages = [path.read_text() for path in (folder / str(rank), folder / "0") if path.is_file()]
        raise _ReplicaFailed(messages[0] if messages else f"replica {rank} failed", failure.exitcode) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _launching(folder: Path) -> Iterator[None]:
    """Set this process up to launch replicas, and leave it as it was."""
    environment, level = dict(os.environ), logging.root.manager.disable
    previous = {number: signal.getsignal(number) for number in _PASSED_ON}  # the launcher takes these over
    logging.disable(logging.ERROR)  # the launcher's notes on signals and dead workers; ours are one line each
    os.environ[MESSAGES_FOLDER] = str(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")  # time to finish the step and save
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            for number, action in previous.items():
                signal.signal(number, action or signal.SIG_DFL)


class _ReplicaFailed(Broken):
    """What a replica said before it ended, with its exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
