"""Profiles a few steps: a trace, a table of kernels, and a timeline of the device's memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline import keyed
from paceline.errors import RunError
from paceline.files import disk_faults
from paceline.planning import Plan
from paceline.training.session import Session
from paceline.training.stopwatch import timed, wait_for

PROFILED_STEPS = 3
"""Steps in the trace, and as many again in the timeline of memory."""
TRACE, KERNELS, OPERATORS, MEMORY = "trace.json", "kernels.csv", "operators.csv", "memory.pickle"
_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
"""What a trace calls the work of a CUDA device."""
_MATRIX_WORDS = ("conv", "mm", "matmul", "linear")
"""What is in the names of operators that multiply matrices, the only ones to compare with a peak of such."""
_HISTORY = 1_000_000
"""Events of the timeline at most."""


def profile_work(session: Session, step: Callable[[], object], folder: Path, step_ms: float) -> dict[str, Any]:
    """Profile the first replica's next steps into a folder; every replica takes them.

    `step_ms` is how long a step takes when nobody looks.
    """
    device, first = session.world.device, session.world.first
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if not first:
        for _step in range((2 if device.type == "cuda" else 1) * PROFILED_STEPS):
            step()
        wait_for(device)
        return {}
    with disk_faults(RunError, folder, "cannot be written", "choose another folder with --profile"):
        folder.mkdir(parents=True, exist_ok=True)
        with profile(activities=activities, with_flops=True) as profiler:
            for _step in range(PROFILED_STEPS):
                step()
            wait_for(device)
        profiler.export_chrome_trace(str(folder / TRACE))
        peaks = device_peaks(session.plan, device)
        averages = list(profiler.key_averages())
        if device.type == "cuda":
            trace = json.loads((folder / TRACE).read_text(errors="replace"), strict=False)
            kernels = kernel_rows(trace["traceEvents"], PROFILED_STEPS, peaks)
            files = [TRACE, KERNELS, OPERATORS, _memory_timeline(step, device, folder)]
        else:
            kernels = host_rows(averages, PROFILED_STEPS)
            files = [TRACE, KERNELS, OPERATORS]
        operators = operator_rows(averages, PROFILED_STEPS, device.type == "cuda", peaks)
        _write_table(folder / KERNELS, kernels)
        _write_table(folder / OPERATORS, operators)
    return {
        "folder": str(folder),
        "files": files,
        "steps": PROFILED_STEPS,
        "step_ms_unprofiled": step_ms,
        "kernels_are": "kernels of the device" if device.type == "cuda" else "operators of the CPU, less those inside",
        **peaks,
        "kernels": kernels,
        "operators": operators,
        "memory_timeline": MEMORY if device.type == "cuda" else None,
    }


def kernel_rows(events: list[dict[str, Any]], steps: int, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """What a CUDA device did in so many steps of a trace, by kernel, the longest first; bytes are known of copies
    only, because a trace gives none for kernels."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in _KINDS:
            continue
        row = rows.setdefault(event["name"], {"calls": 0, "us": 0.0, "bytes": 0})
        row["calls"] += 1
        row["us"] += event.get("dur", 0.0)
        row["bytes"] += event.get("args", {}).get("bytes", 0)
    whole = sum(row["us"] for row in rows.values()) or 1.0
    return [
        {
            "name": name,
            "calls_per_step": row["calls"] / steps,
            "ms_per_step": row["us"] / 1000 / steps,
            "share": row["us"] / whole,
            **_copy_speed(row["bytes"], row["us"] / 1e6, peaks["copy_bytes_per_second"]),
        }
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["us"])
    ]


def _copy_speed(size: int, seconds: float, peak: float) -> dict[str, float | None]:
    """Bytes a second of a copy, and their share of what this device reaches; None where no bytes are known."""
    rate = size / seconds if size and seconds else None
    return {"bytes_per_second": rate, "share_of_copy_speed": rate and rate / peak}


def host_rows(averages: list[Any], steps: int) -> list[dict[str, Any]]:
    """What a CPU did in so many steps, by operator, each without the operators that it calls, the longest first."""
    whole = sum(row.self_cpu_time_total for row in averages) or 1.0
    return [
        {
            "name": row.key,
            "calls_per_step": row.count / steps,
            "ms_per_step": row.self_cpu_time_total / 1000 / steps,
            "share": row.self_cpu_time_total / whole,
        }
        for row in sorted(averages, key=lambda row: -row.self_cpu_time_total)
    ]


def operator_rows(averages: list[Any], steps: int, on_cuda: bool, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """The matrix operators whose arithmetic the profiler counts, with all that they call, the longest first."""
    clock = "device_time_total" if on_cuda else "cpu_time_total"
    matrix = [row for row in averages if row.flops and any(word in row.key for word in _MATRIX_WORDS)]
    timed_rows = [(row, getattr(row, clock)) for row in matrix if getattr(row, clock)]
    peak = peaks["matrix_flops_per_second"]
    return [
        {
            "name": row.key,
            "calls_per_step": row.count / steps,
            "ms_per_step": us / 1000 / steps,
            "flops_per_second": row.flops / (us / 1e6),
            "share_of_matrix_peak": row.flops / (us / 1e6) / peak,
        }
        for row, us in sorted(timed_rows, key=lambda pair: -pair[1])
    ]


def device_peaks(plan: Plan, device: torch.device) -> dict[str, float]:
    """How fast this device copies a large tensor (bytes read and written a second), and multiplies large matrices in
    the plan's precision: the best of a few."""
    large = device.type == "cuda"
    source = torch.zeros(1 << (28 if large else 22), device=device)
    target = torch.empty_like(source)
    size = 8192 if large else 512
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    left, right = (_matrix(size, name, device, kinds.get(plan.placement.precision, torch.float32)) for name in "lr")
    copies = best_seconds(device, lambda: target.copy_(source))
    products = best_seconds(device, lambda: left @ right)
    return {
        "copy_bytes_per_second": 2 * source.numel() * source.element_size() / copies,
        "matrix_flops_per_second": 2 * size**3 / products,
    }


def best_seconds(device: torch.device, work: Callable[[], object], rounds: int = 5) -> float:
    """The shortest of a few times of some work, after one that does not count."""
    work()
    wait_for(device)
    return min(timed(device, work) for _round in range(rounds))


def _matrix(size: int, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers between -1 and 1; a device multiplies equal ones faster than any that are trained."""
    words = keyed.words(keyed.key(0, "peak", name), torch.arange(size * size // 4, device=device))
    rows: Iterator[Tensor] = (word.to(torch.float64) / 2**31 - 1 for word in words)
    return torch.stack(list(rows)).reshape(size, size).to(dtype)


def _memory_timeline(step: Callable[[], object], device: torch.device, folder: Path) -> str:
    """Record what a few steps allocate and free, for torch's viewer of memory snapshots."""
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
    try:
        for _step in range(PROFILED_STEPS):
            step()
        wait_for(device)
        torch.cuda.memory._dump_snapshot(str(folder / MEMORY))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return MEMORY


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else ["name"])
        table.writeheader()
        table.writerows(rows)
