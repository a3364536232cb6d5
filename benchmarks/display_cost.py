"""What it costs a training to be seen: runs with live display, tables, log, report and TensorBoard, and runs without.

Real runs of made CIFAR-like images take turns in one process: with, without, without, with, and so on. Each pair gives
a ratio of images per second, validations included; the time before a run's second report does not count. Two runs warm
up, and say how long the others may be: all of it fits into --seconds, or pairs are left out.

    python benchmarks/display_cost.py --device cuda --precision bf16
    python benchmarks/display_cost.py --model resnet8 --batch 64 --images 1024 --seconds 300
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from paceline.job import Job, plan_job, prepare_folder
from paceline.record import latest, rows_of
from paceline.reporting.sink import ReportSink
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override, parse
from paceline.settings.recipe import Recipe
from paceline.terminal import Terminal
from paceline.training.run import train_run

PAGE = """
epochs: 1
schedule: constant
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
report: 20 steps
"""
SINKS = ["console", "csv", "log", "report", "tensorboard"]
WARM = 2
"""Reports of a run that do not count."""
SHORTEST = 60
"""Steps of a run that measures anything."""


def make_job(arguments: argparse.Namespace, steps: int, seen: bool) -> Job:
    images = f"images: {arguments.images}, validation_images: {arguments.images // 5}, classes: 10, side: 32"
    page = f"model: {arguments.model}\ndata: {{name: synthetic, {images}}}\nglobal_batch: {arguments.batch}\n"
    tree = parse(f"{page}norm_batch: {arguments.batch}\n{PAGE}", "display_cost")
    override(tree, f"epochs={steps} steps", Recipe)
    sinks = [name for name in SINKS if name != "tensorboard" or find_spec(name)] if seen else []
    placed = Tree(
        {
            "device": arguments.device, "precision": arguments.precision, "save": "1000 epochs",
            "micro_batch": arguments.batch, "cpu_threads": 1, "sinks": sinks,
        },
        {(): "here"},
    )  # fmt: skip
    return plan_job("display_cost", build(Recipe, tree), build(Placement, placed), None, tree, placed)


@contextmanager
def terminal() -> Iterator[Console]:
    """A terminal of 80 x 24 that another process reads, as one on the screen is."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        os.close(ours)
        with os.fdopen(theirs, "w") as file:
            yield Terminal(file=file, force_terminal=True, width=80, height=24)
        reader.kill()


def speed_of(job: Job, folder: Path, console: Console) -> tuple[float, float]:
    """Images per second of a run, and the seconds that all threads of this process computed for it."""
    prepare_folder(job, folder)
    start = time.process_time()
    status = train_run(job, folder, console, [], {"report": ReportSink})
    computed = time.process_time() - start
    reports = latest(rows_of(folder), "report")[WARM - 1 :]
    assert status == 0
    first, last = reports[0], reports[-1]
    images = (last["step"] - first["step"]) * job.plan.global_batch
    return images / (last["total_seconds"] - first["total_seconds"]), computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="{name: resnet18, stem: 3x3}", help="as a recipe has it")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=75, help="for everything but the imports")
    arguments = parser.parse_args()
    began, left_out = time.perf_counter(), [name for name in SINKS if name == "tensorboard" and not find_spec(name)]
    ratios = []
    with tempfile.TemporaryDirectory() as scratch, terminal() as console:
        speed, start = 1.0, began
        for name in ("kernels", "length"):  # the first run compiles and chooses kernels
            start = time.perf_counter()
            speed, _ = speed_of(make_job(arguments, SHORTEST, True), Path(scratch, name), console)
        step = arguments.batch / speed
        around = max(0.0, time.perf_counter() - start - SHORTEST * step)  # what comes before and after the steps
        room = (arguments.seconds - (time.perf_counter() - began)) / (2 * arguments.pairs) - around
        steps = max(SHORTEST, int(0.9 * room / step))
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
        print(
            f"{arguments.model}, batch {arguments.batch}, on {device}, torch {torch.__version__}: {steps} steps a run"
        )
        if left_out:
            print("tensorboard is not installed, and so left out")
        for pair in range(arguments.pairs):
            start, speeds, computed = time.perf_counter(), {}, {}
            for seen in (True, False) if pair % 2 == 0 else (False, True):
                folder = Path(scratch, f"{pair}-{seen}")
                speeds[seen], computed[seen] = speed_of(make_job(arguments, steps, seen), folder, console)
            ratios.append(speeds[True] / speeds[False])
            both = f"{speeds[True]:,.0f} images/s with, {speeds[False]:,.0f} without"
            threads = f"{computed[True]:.2f} and {computed[False]:.2f} s of CPU"
            print(f"pair {pair + 1}: {both}: {ratios[-1]:.4f} ({threads})", flush=True)
            now = time.perf_counter()
            if now - began + (now - start) > arguments.seconds + 10:
                break  # somebody else is busy here, too
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"throughput with / without: median {middle:.4f}, from {low:.4f} to {high:.4f}; {2 * len(ratios)} runs")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
