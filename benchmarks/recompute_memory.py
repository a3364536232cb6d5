"""What recomputation saves and costs: peak memory of a step beside its state, and time, with the same kernels.

The first step chooses kernels. In the second, memory is read from torch's allocator: the most in tensors during the
step, less what was there before it (weights, optimizer state, images). Later steps are timed, as CUDA graphs where the
placement has them. Both placements take turns.

    python benchmarks/recompute_memory.py
    python benchmarks/recompute_memory.py timm/resnet50-a3 --batch 128 --recompute "[stage1, stage2]"

On a CPU, whose memory nothing measures, only time is printed:

    python benchmarks/recompute_memory.py cifar10/resnet20 --batch 16 --device cpu --steps 2
"""

from __future__ import annotations

import argparse
import gc
import statistics
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paceline.command.bench_job import train_job
from paceline.planning import Plan
from paceline.training.session import open_session
from paceline.training.step import take_step
from paceline.training.stopwatch import timed, wait_for

BLOCKS = 5
"""So many times are taken in each turn; the median counts."""


def measure(plan: Plan, steps: int) -> tuple[int, float]:
    """Bytes that a step takes beside what was there before it, and its seconds."""
    gc.collect()
    if plan.placement.device == "cuda":
        torch.cuda.empty_cache()
    with TemporaryDirectory() as folder, open_session(plan, Path(folder)) as session:
        device = session.world.device
        with closing(session.loader.training(0)) as batches:
            batch = next(batches)
            take_step(session, batch)
            wait_for(device)
            peak = 0
            if device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                take_step(session, batch)
                wait_for(device)
                peak = torch.cuda.max_memory_allocated() - before
            for _ in range(3):  # one of them is recorded
                take_step(session, batch)
            wait_for(device)

            def work() -> None:
                for _ in range(steps):
                    take_step(session, batch)

            times = [timed(device, work) for _ in range(BLOCKS)]
        return peak, statistics.median(times) / steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipe", nargs="?", default="nvidia/resnet50")
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument("--recompute", default="all")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--steps", type=int, default=10, help="steps of a time that is taken")
    arguments.add_argument("--turns", type=int, default=3)
    given = arguments.parse_args()
    size = given.batch
    words = [f"global_batch={size}", f"norm_batch={size}", f"on.micro_batch={size}"]
    ways = {
        "nothing": words,
        given.recompute: [*words, f"on.recompute={given.recompute}"],
    }
    plans = {way: train_job(given.recipe, more, None, None, 1, given.device).job.plan for way, more in ways.items()}
    found: dict[str, list[tuple[int, float]]] = {way: [] for way in ways}
    for _ in range(given.turns):
        for way, plan in plans.items():
            found[way].append(measure(plan, given.steps))
    hardware = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    placement = plans["nothing"].placement
    print(f"{given.recipe}, {size} images, {placement.precision}, kernels {placement.kernels}, on {hardware}")
    peaks = {way: statistics.median(peak for peak, _ in rows) for way, rows in found.items()}
    times = {way: statistics.median(seconds for _, seconds in rows) for way, rows in found.items()}
    for way in ways:
        memory = f"{peaks[way] / 2**20:10,.0f} MiB beside the state" if peaks[way] else " " * 10
        spread = [1000 * seconds for _, seconds in found[way]]
        print(f"recomputed: {way:20} {memory} {1000 * times[way]:9.2f} ms ({min(spread):.2f} to {max(spread):.2f})")
    longer = times[given.recompute] / times["nothing"] - 1
    saved = f"{1 - peaks[given.recompute] / peaks['nothing']:.1%} less memory for " if peaks["nothing"] else ""
    print(f"{saved}{longer:+.1%} time")


if __name__ == "__main__":
    main()
