"""How long saving holds up training: each step's time in a run that saves every few steps, by what it stood behind.

python benchmarks/save_speed.py --model resnet50 --every 10 --saves 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from paceline.job import plan_job
from paceline.planning import Plan
from paceline.record import Row, latest
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override, parse
from paceline.settings.recipe import Recipe
from paceline.training.loop import train
from paceline.training.restore import restore_newest
from paceline.training.session import open_session

PAGE = """
data: {name: generated, images: 4096, validation_images: 8, classes: 1000, side: 32}
global_batch: 8
epochs: 1
evaluate: {every: never}
report: 1000 epochs
schedule: constant
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
norm_batch: 8
"""


class Times:
    """A sink that notes when each step was done."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def row(self, row: Row) -> None:
        """Rows are read from the record."""

    def progress(self, what: str, _done: int, _total: int) -> None:
        if what == "training":
            self.at.append(time.perf_counter())


def make_plan(model: str, every: int, saves: int, device: str) -> Plan:
    tree = parse(f"model: {model}\n{PAGE}", "save_speed")
    override(tree, f"epochs={every * saves + every // 2} steps", Recipe)
    placed = Tree({"device": device, "save": f"{every} steps", "keep_last": 2, "keep_best": False}, {(): "here"})
    return plan_job("save_speed", build(Recipe, tree), build(Placement, placed), None, tree, placed).plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the run folder is made, so on which disk")
    arguments = parser.parse_args()
    plan, times = make_plan(arguments.model, arguments.every, arguments.saves, arguments.device), Times()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, open_session(plan, Path(folder)) as session:
        session.run.sinks = [times]
        restore_newest(session)
        train(session)
        rows = latest(session.run.rows(), "checkpoint")
    gaps = [1000 * (after - before) for before, after in zip(times.at, times.at[1:], strict=False)]
    behind = gaps[arguments.every - 1 :: arguments.every]  # a save stands between these two steps
    others = sorted(gap for number, gap in enumerate(gaps, 1) if number % arguments.every and number > 2)
    print(f"{arguments.model} on {arguments.device}, torch {torch.__version__}: {rows[-1]['bytes'] / 1e6:.0f} MB")
    seconds = statistics.median(row["seconds"] for row in rows)
    print(f"a checkpoint takes {1000 * seconds:.0f} ms from the copy to the disk (median of {len(rows)})")
    print(f"a step takes {statistics.median(others):.0f} ms (worst {others[-1]:.0f}) where none is due before it")
    copy = statistics.median(row["held_seconds"] for row in rows)
    held = statistics.median(behind) - statistics.median(others)
    print(
        f"and {statistics.median(behind):.0f} ms (worst {max(behind):.0f}) behind one: held up for {held:.0f} ms, "
        f"{1000 * copy:.0f} of them by the copy"
    )


if __name__ == "__main__":
    main()
