"""Binds each replica of a host to cores near its memory and its device (Linux), and never to more than it was given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.launch import Launch

SYSTEM = Path("/sys")


@contextmanager
def bound(bind: bool, launch: Launch | None, pci: str | None = None) -> Iterator[None]:
    """Bind all threads of this process to this replica's cores while the context lasts.

    `pci` is the address of its accelerator, if it has one.
    """
    if not bind or launch is None:
        yield
        return
    before = os.sched_getaffinity(0)
    # On one host the rank says it too, and some launchers say nothing else.
    local_rank = launch.rank if launch.local_count == launch.count else launch.local_rank
    _bind(cores_of(local_rank, launch.local_count, before, device_node(pci)))
    try:
        yield
    finally:
        _bind(before)


def bound_cores() -> str:
    """The cores that this process may use, as Linux writes them: 0-7,16-23."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    cores = sorted(os.sched_getaffinity(0))
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def cores_of(rank: int, count: int, allowed: set[int], node: int | None = None, system: Path = SYSTEM) -> set[int]:
    """The cores of one replica among `count` of this host: those of its device's NUMA node, else an equal share.

    Shares are neighbors: a share spans no more nodes than it must, and holds both threads of a core.
    """
    nodes = numa_nodes(system)
    if node is not None and (near := nodes.get(node, set()) & allowed):
        return near
    node_of = {core: number for number, cores in nodes.items() for core in cores}
    ordered = sorted(allowed, key=lambda core: (node_of.get(core, 0), _first_sibling(core, system), core))
    share = ordered[len(ordered) * rank // count : len(ordered) * (rank + 1) // count]
    return set(share) or allowed


def numa_nodes(system: Path = SYSTEM) -> dict[int, set[int]]:
    """The cores of each NUMA node that has any; none where the system does not say."""
    found = {}
    for folder in system.glob("devices/system/node/node[0-9]*"):
        if cores := _listed(folder / "cpulist"):
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def device_node(pci: str | None, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a device; None where it has none, or the system does not say."""
    if pci is None:
        return None
    with suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / pci / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _first_sibling(core: int, system: Path) -> int:
    """The lowest thread of the physical core that this one is a thread of."""
    return min(_listed(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"), default=core)


def _listed(path: Path) -> set[int]:
    """The numbers in a file such as 0-7,16-23."""
    with suppress(OSError, ValueError):
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    return set()


def _bind(cores: set[int]) -> None:
    """Bind every thread that there is; later ones inherit it."""
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        with suppress(OSError):  # a thread that has ended, or cores that were taken away meanwhile
            os.sched_setaffinity(int(task), cores)
