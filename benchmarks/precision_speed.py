"""Paceline's own training step in bf16 against float32 on this machine's CPU, for one network after the other.

Two runs are open in one process and take their steps in turns: the whole step, with loader, update and statistics. The
ratio is float32's time by bf16's, so that more than 1 means that bf16 is faster. On a machine that does other things as
well, the ratio of processor times says more than that of wall times.

    python benchmarks/precision_speed.py resnet50 resnet20:128:32
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.job import plan_job
from paceline.machine import this_machine
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe
from paceline.training.restore import restore_newest
from paceline.training.session import open_session
from paceline.training.step import take_step

PRECISIONS = ("fp32", "bf16")


class Case(NamedTuple):
    """A network, the images of a step, and their side."""

    model: str
    batch: int
    side: int


class Seconds(NamedTuple):
    """What a step takes of the clock, and of the processor."""

    wall: float
    processor: float


def plan_of(case: Case, precision: str, threads: int) -> Plan:
    text = (
        f"model: {case.model}\ndata: {{name: synthetic, images: 4096, classes: 1000, side: {case.side}}}\n"
        f"global_batch: {case.batch}\nepochs: 1\nschedule: constant\n"
        "optimizer: {name: sgd, lr: 0.01, momentum: 0.9}\n"
    )
    words = {"device": "cpu", "precision": precision, "micro_batch": case.batch, "cpu_threads": threads}
    placement = build(Placement, Tree(words))
    return plan_job("benchmark", build(Recipe, parse(text, "benchmark")), placement, None, Tree(), Tree()).plan


def steps_of(case: Case, threads: int, turns: int) -> dict[str, list[Seconds]]:
    """The time of each step in each precision, turn by turn; the first two steps of each do not count."""
    times: dict[str, list[Seconds]] = {precision: [] for precision in PRECISIONS}
    with ExitStack() as stack:
        sessions, loaders = [], []
        for precision in PRECISIONS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            session = stack.enter_context(open_session(plan_of(case, precision, threads), folder))
            restore_newest(session)
            sessions.append(session)
            loaders.append(stack.enter_context(closing(session.loader.training(0))))
        for turn in range(turns + 2):
            for precision, session, loader in zip(PRECISIONS, sessions, loaders, strict=True):
                batches = next(loader)
                wall, processor = time.perf_counter(), time.process_time()
                take_step(session, batches)
                taken = Seconds(time.perf_counter() - wall, time.process_time() - processor)
                if turn >= 2:
                    times[precision].append(taken)
    return times


def measure(case: Case, threads: int, turns: int) -> dict[str, object]:
    times = steps_of(case, threads, turns)
    pairs = list(zip(times["fp32"], times["bf16"], strict=True))
    wall, processor = ([a[at] / b[at] for a, b in pairs] for at in (0, 1))
    return {
        **case._asdict(),
        "wall_ratio": round(statistics.median(wall), 3),
        "processor_ratio": round(statistics.median(processor), 3),
        "processor_ratios": [round(ratio, 2) for ratio in processor],
        "processor_seconds": {p: round(statistics.median(t.processor for t in times[p]), 3) for p in PRECISIONS},
        "threads": threads,
        "torch": torch.__version__,
    }


def cases(words: list[str]) -> Iterator[Case]:
    for word in words:
        model, batch, side = [*word.split(":"), *("8", "224")[word.count(":") :]]
        yield Case(model, int(batch), int(side))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NAME[:BATCH[:SIDE]]", help="8 images of 224 pixels if left out")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    options = parser.parse_args()
    for one in cases(options.networks):
        print(json.dumps(measure(one, options.threads, options.turns)), flush=True)
