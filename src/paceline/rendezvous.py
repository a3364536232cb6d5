"""Where the processes of a run meet before they start: the first decides for all, and all must have the same; with
`world`, a user of torch.distributed."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.agreement import difference, digest_of_agreement
from paceline.errors import Broken, PlanError, UserError
from paceline.launch import MESSAGES_FOLDER, Launch

SHARED = "an accelerator is shared"
"""The store's word that NCCL, which wants one for each process, cannot be used."""
_TELLING = timedelta(seconds=10)
"""The first process, which may serve the store, waits so long for the others to read why they cannot start."""
_opened: dict[tuple[str, int], Any] = {}
"""Stores that processes have met at to decide, and will meet at again to start."""
_decisions = itertools.count()


def decided_by_first(
    launch: Launch, seconds: float, mine: Any, decide: Callable[[list[Any]], Any], patience: float = 0.0
) -> Any:
    """What the first process decides by what every process brings; all of it is JSON. If it cannot, nobody starts.

    Processes have so many seconds to come, and the first has as many of `patience` to decide.
    """
    timeout = timedelta(seconds=seconds)
    base = _open_store(launch, timeout)
    _opened[launch.address, launch.port] = base
    store = PrefixStore(f"{_prefix(launch)}/{next(_decisions)}", base)
    store.set(f"here/{launch.rank}", json.dumps(mine))
    if launch.rank == 0:
        _wait_for_all(store, launch, timeout)
        try:
            decision = {"decided": decide([json.loads(store.get(f"here/{rank}")) for rank in range(launch.count)])}
        except UserError as fault:
            store.set("decision", json.dumps({"fault": str(fault)}))
            with suppress(RuntimeError, dist.DistError):
                store.wait([f"told/{rank}" for rank in range(1, launch.count)], _TELLING)
            raise
        store.set("decision", json.dumps(decision))
        return decision["decided"]
    try:
        store.wait(["decision"], timeout + timedelta(seconds=patience))
        decision = json.loads(store.get("decision"))
        store.set(f"told/{launch.rank}", "")
    except (RuntimeError, dist.DistError):
        raise Broken(f"replica 0 has decided nothing within {seconds + patience:g} s") from None
    if "fault" in decision:
        raise PlanError(decision["fault"])
    return decision["decided"]


def meet(launch: Launch, timeout: timedelta, facts: dict[str, str], accelerator: str | None = None) -> Any:
    """Return the store of all replicas once each has come with the same facts; name those missing, or what differs.

    It says whether several of them have come with one `accelerator`.
    """
    base = _opened.pop((launch.address, launch.port), None) or _open_store(launch, timeout)
    store = PrefixStore(_prefix(launch), base)
    if accelerator and store.add(f"accelerator/{accelerator}", 1) > 1:
        store.set(SHARED, "")
    store.set(f"facts/{launch.rank}", json.dumps({"host": platform.node(), "facts": facts}))
    store.set(f"here/{launch.rank}", digest_of_agreement(facts))
    _wait_for_all(store, launch, timeout)
    ranks, expected = range(launch.count), store.get("here/0")
    if differ := [rank for rank in ranks if store.get(f"here/{rank}") != expected]:
        first, other = (json.loads(store.get(f"facts/{rank}")) for rank in (0, differ[0]))
        store.set(f"told/{launch.rank}", "")
        if launch.rank == 0 and not launch.store_is_there:
            with suppress(RuntimeError, dist.DistError):  # the others read this from replica 0, which ends last
                store.wait([f"told/{rank}" for rank in ranks], _TELLING)
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        raise Broken(
            f"replica {differ[0]} on {other['host']}{more} differs from replica 0 on {first['host']}: "
            f"{difference(first['facts'], other['facts'])}"
        )
    return store


def _open_store(launch: Launch, timeout: timedelta) -> Any:
    """The store at the place where all processes meet, which the launcher or the first of them serves."""
    serves = launch.rank == 0 and not launch.store_is_there
    try:
        return TCPStore(launch.address, launch.port, None, serves, timeout, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as fault:
        reason = str(fault).splitlines()[0][:160]
        raise Broken(f"cannot reach the rendezvous at {launch.address}:{launch.port}: {reason}") from None


def _prefix(launch: Launch) -> str:
    """Where the words of these processes are in a store; an agent that starts fewer or more of them keeps its store."""
    return f"paceline/{launch.attempt}/{launch.count}"


def _wait_for_all(store: Any, launch: Launch, timeout: timedelta) -> None:
    """Wait until every process has come; name those that have not."""
    ranks = range(launch.count)
    try:
        store.wait([f"here/{rank}" for rank in ranks], timeout)
    except (RuntimeError, dist.DistError):
        absent = ", ".join(str(rank) for rank in ranks if not store.check([f"here/{rank}"]))
        raise Broken(
            f"replica {absent} did not reach the rendezvous at {launch.address}:{launch.port} within "
            f"{timeout.total_seconds():g} s"
        ) from None


def die_with_launcher() -> None:
    """A replica whose launcher, torchrun or Paceline's own, was killed must not train on alone, nor keep the run folder
    from those that come after it (Linux)."""
    if os.environ.get(MESSAGES_FOLDER) or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def die_with_parent() -> None:
    """Let this process be killed as soon as the one that started it has ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
