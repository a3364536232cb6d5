"""What a run folder remembers of micro-batches that ran out of memory, so that no later start tries them again."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import Broken, PlanError
from paceline.files import disk_faults, read_whole, write_whole
from paceline.layouts import fitting_sizes
from paceline.planning import Plan
from paceline.stages import check_stages

RAN_OUT = "ran-out.json"
_ALIKE = ("device", "precision", "weights", "kernels", "compile", "recompute", "stages", "offload")
"""What else decides how much memory a micro-batch takes."""


def next_smaller(plan: Plan) -> int | None:
    """The next smaller micro-batch that fits the recipe, and the pipeline if there is one."""
    sizes = fitting_sizes(plan.recipe, plan.norm_batch, plan.replicas)
    for size in sorted((size for size in sizes if size < plan.micro_batch), reverse=True):
        with suppress(PlanError):
            check_stages(replace(plan, placement=plan.placement.model_copy(update={"micro_batch": size})))
            return size
    return None


def remember(folder: Path, plan: Plan) -> None:
    """Remember that the plan's micro-batch took more memory than there is."""
    before, entry = _entries(folder), {**_kind(plan), "memory": plan.placement.memory, "micro_batch": plan.micro_batch}
    if plan.processes == 1 and entry in before:  # several processes may run out of memory side by side
        raise Broken(f"{folder / RAN_OUT} knows of it, and yet it was tried again; write a smaller one yourself")
    with disk_faults(Broken, folder / RAN_OUT, "cannot be written"):
        write_whole(folder / RAN_OUT, json.dumps([*before, entry], indent=1))


def remembered(folder: Path) -> int:
    """How often a micro-batch was too large so far."""
    return len(_entries(folder))


def least_too_large(folder: Path, plan: Plan, memory: int) -> int | None:
    """The smallest micro-batch of such a plan that is known to take more than this much memory, if any is."""
    kind = _kind(plan)
    alike = [entry for entry in _entries(folder) if {key: entry.get(key) for key in kind} == kind]
    return min((entry["micro_batch"] for entry in alike if entry["memory"] >= memory), default=None)


def _kind(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.placement.model_dump_json(include=set(_ALIKE)))
    return found


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What is remembered; a damaged file is nothing worse than another try."""
    with suppress(OSError, ValueError, RecursionError):
        entries = json.loads(read_whole(folder / RAN_OUT))
        if isinstance(entries, list):
            return [entry for entry in entries if isinstance(entry, dict) and _is_whole(entry)]
    return []


def _is_whole(entry: dict[str, Any]) -> bool:
    return all(isinstance(entry.get(key), int) for key in ("memory", "micro_batch"))
