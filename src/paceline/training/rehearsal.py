"""One step of one replica among many, in this process alone: what it sends, and the memory that it takes."""

from __future__ import annotations

import resource
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline.errors import PlanError
from paceline.fake_world import rehearsal_world
from paceline.planning import Plan
from paceline.record import Run
from paceline.training.requests import Requests
from paceline.training.run import out_of_memory
from paceline.training.session import Session, torch_settings
from paceline.training.state import initialize_state
from paceline.training.step import take_step
from paceline.training.train_speed import memory_faults


def rehearse(plan: Plan, rank: int) -> dict[str, Any]:
    """Take a step as replica `rank` of the plan, whose other replicas are played: count its collectives and memory.

    What the others would send is made up, so nothing that is learned means anything.
    """
    if plan.stages > 1:
        raise PlanError("--rehearse plays replicas of whole networks; leave on.stages and on.splits out")
    if not 0 <= rank < plan.replicas:
        raise PlanError(f"--rehearse {rank}: the plan has replicas 0 to {plan.replicas - 1}; write one of them")
    with (
        torch_settings(plan.placement),
        rehearsal_world(plan, rank) as world,
        memory_faults(out_of_memory(plan)),
        TemporaryDirectory(prefix="paceline-") as folder,
    ):
        session = Session(plan, world, Run(Path(folder), "read"), Requests(world))
        initialize_state(session.state, plan)
        with closing(session.loader.training(0)) as steps:
            for batches in islice(steps, min(2, plan.steps)):  # the first finds the memory for the second
                world.sent.clear()
                take_step(session, batches)
        collectives = [
            {**dict(zip(("collective", "among", "on", "type"), key, strict=True)), "calls": calls, "bytes": size}
            for key, (calls, size) in world.sent.items()
        ]
    return {
        "replica": rank,
        "replicas": plan.replicas,
        "images": sum(batch.count for batch in batches),
        "forward_passes": len(batches),
        "peak_memory": _peak_memory(world.device),
        "collectives": collectives,
    }


def _peak_memory(device: torch.device) -> int:
    """The most bytes in tensors on a CUDA device; on a CPU, the most that the whole process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
