"""Which process of how many this is, as a launcher (Paceline itself, torchrun or Slurm) says; read without torch."""

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


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What the launcher said, or None for a process that a person started."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Launch(
            rank=int(environment["RANK"]),
            count=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_count=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", "29500")),
            store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    # srun says how many tasks a step has; the batch script around it, which is one process, does not see this.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        job = int(environment.get("SLURM_JOB_ID", "0"))
        return Launch(
            rank=int(environment["SLURM_PROCID"]),
            count=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment.get("SLURM_LOCALID", "0")),
            local_count=int(environment.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]),
            address=environment.get("MASTER_ADDR")
            or first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")),
            port=int(environment.get("MASTER_PORT", 20_000 + job % 20_000)),
            store_is_there=False,
            attempt=environment.get("SLURM_RESTART_COUNT", "0"),
        )
    return None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as 'gpu[003-007,9],login1'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise PlanError("Slurm gave no node list; set MASTER_ADDR to the first host's name")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])
