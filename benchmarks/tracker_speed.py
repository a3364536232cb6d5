"""What trackers cost the training thread: the time that one report takes from it while the tracker works.

Rows come 50 ms apart, as from a training, so that a tracker's own work in its thread disturbs them as it would there.

    WANDB_MODE=offline python benchmarks/tracker_speed.py --rows 200
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from paceline.planning import Plan
from paceline.record import Row, Run
from paceline.settings.build import build
from paceline.settings.placement import Placement, SinkName
from paceline.settings.read import Tree
from paceline.sink import TRACKERS
from paceline.sink.tracking import TrackingSink


def report(step: int) -> Row:
    fields = ("loss", "top1", "last_loss", "last_top1", "lr", "bad_steps", "bad_steps_in_a_row", "first_bad_step")
    times = ("images", "step_seconds", "images_per_second", "waiting", "total_seconds")
    return {"kind": "report", "step": step, "epoch": step / 100, **dict.fromkeys((*fields, *times), 0.5)}


def demo_plan() -> Plan:
    from paceline.job import DEFAULT_RECIPE, plan_job, read_recipe

    recipe, written = read_recipe(DEFAULT_RECIPE, [])
    placed = Tree({"device": "cpu"}, {(): "here"})
    return plan_job(DEFAULT_RECIPE, recipe, build(Placement, placed), None, written, placed).plan


def measure(name: SinkName, plan: Plan, folder: Path, rows: int) -> None:
    with Run(folder, "own") as run:
        sink = TrackingSink(name, TRACKERS[name], plan, run)
        sink.row({"kind": "start", "step": 0})
        times = []
        for step in range(1, rows + 1):
            row = report(step)
            start = time.perf_counter()
            sink.row(row)
            times.append(1000 * (time.perf_counter() - start))
            time.sleep(0.05)
        start = time.perf_counter()
        sink.row({"kind": "end", "step": rows})
        notes = [row["text"] for row in run.rows() if row["kind"] == "note"]
        median, worst = statistics.median(times), max(times)
        last = time.perf_counter() - start
        print(f"{name}: {median:.3f} ms a row (worst {worst:.3f}), end after {last:.1f} s; notes: {notes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--trackers", nargs="+", default=list(TRACKERS), choices=list(TRACKERS))
    arguments = parser.parse_args()
    plan = demo_plan()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.trackers:
            measure(name, plan, Path(folder, name), arguments.rows)


if __name__ == "__main__":
    main()
