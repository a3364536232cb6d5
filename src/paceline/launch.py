"""Which process of how many this is, as a launcher (Paceline itself, torchrun, Slurm, mpiexec) says; without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import PlanError

MESSAGES_FOLDER = "PACELINE_MESSAGES_FOLDER"
"""Set for replicas that Paceline started itself: the folder in which each leaves the line that its parent prints."""


@dataclass(frozen=True)
class Launch:
    """One process among those a launcher started."""

    rank: int
    count: int
    local_rank: int
    local_count: int
    """Processes on this host."""
    address: str
    port: int
    store_is_there: bool
    """Whether the launcher serves the rendezvous itself; otherwise process 0 does."""
    attempt: str = "0"


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""The variables by which an mpiexec tells its processes rank, count, local rank and local count: that of Open MPI, and
that of MPICH and Intel MPI."""


_LAUNCHERS = ("TORCHELASTIC_", "OMPI_", "PMI", "MPI_LOCAL", "SLURM_", "GROUP_", "ROLE_", "MASTER_")
_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", MESSAGES_FOLDER)


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that is none of those a launcher started."""
    return {key: value for key, value in environment.items() if key not in _TOLD and not key.startswith(_LAUNCHERS)}


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What the launcher said, or None for a process that a person started."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        count = _number(environment, "WORLD_SIZE")
        local_count = _number(environment, "LOCAL_WORLD_SIZE", count)
        return Launch(
            rank=_number(environment, "RANK"),
            count=count,
            local_rank=_number(environment, "LOCAL_RANK", 0),
            local_count=local_count,
            address=_meeting_place(environment, count, local_count),
            port=_number(environment, "MASTER_PORT", 29500),
            store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    # Before Slurm, whose srun may have started mpiexec's own daemons: their places are not those of the replicas.
    for mpi in (OPEN_MPI, HYDRA):
        if all(name in environment for name in mpi):
            return _by_mpi(environment, mpi)
    # srun says how many tasks a step has; the batch script around it, which is one process, does not see this.
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return _by_slurm(environment)
    _refuse_half_told(environment)
    return None


def _by_mpi(environment: Mapping[str, str], mpi: tuple[str, ...]) -> Launch | None:
    rank, count, local_rank, local_count = (_number(environment, name) for name in mpi)
    if count == 1:
        return None
    address, port = _meeting_place(environment, count, local_count), _number(environment, "MASTER_PORT", 29500)
    return Launch(rank, count, local_rank, local_count, address, port, store_is_there=False)


def _by_slurm(environment: Mapping[str, str]) -> Launch | None:
    count = _number(environment, "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return Launch(
        rank=_number(environment, "SLURM_PROCID"),
        count=count,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_count=int(environment.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_number(environment, "MASTER_PORT", 20_000 + _number(environment, "SLURM_JOB_ID", 0) % 20_000),
        store_is_there=False,
        attempt=environment.get("SLURM_RESTART_COUNT", "0"),
    )


def _meeting_place(environment: Mapping[str, str], count: int, local_count: int) -> str:
    """Where the processes find each other: on this host, if all of them are here."""
    if address := environment.get("MASTER_ADDR"):
        return address
    if local_count < count:
        raise PlanError(
            f"the launcher started {count} processes, {local_count} of them on this host, and did not say where they "
            "meet; set MASTER_ADDR to the name of the host of process 0 (mpiexec passes it on with -x or -genv)"
        )
    return "127.0.0.1"


def _refuse_half_told(environment: Mapping[str, str]) -> None:
    """Refuse to train alone where a launcher has started several processes, or may have, and does not say how many."""
    told = next((name for name in ("PMIX_RANK", "PMI_RANK") if name in environment), None)
    if "RANK" in environment and _number(environment, "RANK") > 0:
        told = "RANK"
    if "RANK" not in environment and _number(environment, "WORLD_SIZE", 1) > 1:
        told = "WORLD_SIZE"
    if told:
        raise PlanError(
            f"{told}={environment[told]} says that a launcher started this process, and not all that it takes to find "
            "the others; start it with torchrun, srun or the mpiexec of Open MPI, MPICH or Intel MPI, or set RANK, "
            f"WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR; to train alone, unset {told}"
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise PlanError(f"the environment variable {name} is '{text}', and should be a number; unset it") from None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as 'gpu[003-007,9],login1'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise PlanError("Slurm gave no node list; set MASTER_ADDR to the first host's name")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])
