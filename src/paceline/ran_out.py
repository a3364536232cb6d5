"""What a run folder remembers of micro-batches that ran out of memory, so that no later start tries them again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import Broken
from paceline.files import disk_faults, read_whole, write_whole
from paceline.layouts import fitting_sizes
from paceline.planning import Plan

RAN_OUT = "ran-out.json"
_ALIKE = ("device", "precision", "weights", "kernels", "compile", "recompute", "stages", "offload")
"""What else decides how much memory a micro-batch takes."""


def next_smaller(plan: Plan) -> int | None:
    """The next smaller micro-batch that fits the recipe."""
    sizes = fitting_sizes(plan.recipe, plan.norm_batch, plan.replicas)
    return max((size for size in sizes if size < plan.micro_batch), default=None)


def remember(folder: Path, plan: Plan) -> None:
    """Remember that the plan's micro-batch took more memory than there is."""
    entries = [*_entries(folder), {**_kind(plan), "memory": plan.placement.memory, "micro_batch": plan.micro_batch}]
    with disk_faults(Broken, folder / RAN_OUT, "cannot be written"):
        write_whole(folder / RAN_OUT, json.dumps(entries, indent=1))


def remembered(folder: Path) -> int:
    """How often a micro-batch was too large so far."""
    return len(_entries(folder))


def least_too_large(folder: Path, plan: Plan) -> int | None:
    """The smallest micro-batch that is known to take more memory than this plan has, if any is."""
    kind, memory = _kind(plan), plan.placement.memory
    alike = [entry for entry in _entries(folder) if {key: entry.get(key) for key in kind} == kind]
    sizes = [entry["micro_batch"] for entry in alike if entry.get("memory", 0) >= memory]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def _kind(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.placement.model_dump_json(include=set(_ALIKE)))
    return found


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What is remembered; a damaged file is nothing worse than another try."""
    with suppress(OSError, ValueError, RecursionError):
        entries = json.loads(read_whole(folder / RAN_OUT))
        if isinstance(entries, list):
            return [entry for entry in entries if isinstance(entry, dict)]
    return []
