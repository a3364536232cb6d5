"""paceline average: one network from a run's saved checkpoints, judged beside the last of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import checkpoint
from paceline.command.job import Job, run_replicas
from paceline.command.resume import stored_job
from paceline.command.show import show_rows
from paceline.errors import RunError, SpecError
from paceline.record import Row, Run

if TYPE_CHECKING:
    from paceline.train.average import Method


def run(
    folder: Path, words: list[str], last: int | None, decay: float | None, recalibrate: int | None, data: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Average, judge, write RUN/averaged and print what came out beside the last checkpoint."""
    _check(last, decay, recalibrate)
    job = stored_job(folder, ["on.replicas=auto", "on.micro_batch=auto", *words], data)
    steps = steps_to_average(folder, last)
    started = run_replicas(job)
    if started is not None:
        return started
    from paceline.train.average import Method

    rows = make(job, Run(folder, writer=False), steps, Method(decay, recalibrate))
    if job.launch is None or job.launch.rank == 0:
        if as_json:
            print(json.dumps(rows[-1], indent=1))
        else:
            _show(rows)
            print(
                f"\n{folder / 'averaged'}; train from it with init.from={folder / 'averaged' / 'network.safetensors'}"
            )
    return 0


def steps_to_average(folder: Path, last: int | None) -> list[int]:
    """The steps of the last so many checkpoints, or of all; initial weights are no part of an average."""
    saved = [step for step in checkpoint.saved_steps(folder / "checkpoints") if step > 0]
    if not saved:
        raise RunError(f"{folder}: there is no checkpoint of a trained step to average; train this run first")
    if last is not None and last > len(saved):
        there = f"{len(saved)} ({', '.join(map(str, saved))})" if len(saved) > 1 else f"1 (step {saved[0]})"
        raise RunError(
            f"{folder}: --last {last}, and of the checkpoints of trained steps there are {there}; "
            f"write --last {len(saved)} or less, or train with a larger on.keep_last"
        )
    return saved[-last:] if last else saved


def make(job: Job, run: Run, steps: list[int], method: Method) -> list[Row]:
    """The last checkpoint judged, then the average of all."""
    from paceline.data.loader import open_loader
    from paceline.train.average import average
    from paceline.train.evaluate import judge
    from paceline.train.session import settle_torch
    from paceline.train.state import fresh, restore
    from paceline.world import join

    plan = job.plan
    settle_torch(plan)
    world = join(plan, job.launch)
    steps = world.agree(steps)
    loader = open_loader(plan, job.data_folder, world.replica, world.device)
    state = fresh(plan, world)
    run.writer = world.first
    name = checkpoint.name_of(steps[-1])
    restore(state, checkpoint.read(run.checkpoints / name), name)
    found = judge(plan, world, state, loader)
    made = average(plan, world, run, state, loader, steps, method, found["top1"])
    world.wait_for_all()
    world.close()
    what = "last checkpoint, its moving average" if found.get("averaged") else "last checkpoint"
    before: Row = {"method": what, "steps": steps[-1:], **found}
    return [before, {key: value for key, value in made.items() if key != "kind"}]


def _check(last: int | None, decay: float | None, recalibrate: int | None) -> None:
    if last is not None and decay is not None:
        raise SpecError("--last and --decay: write one; --last N is the mean of N, --decay D weighs all that are kept")
    if last is not None and last < 1:
        raise SpecError(f"--last {last}: expected how many checkpoints to average, such as --last 5")
    if decay is not None and not 0 <= decay < 1:
        raise SpecError(f"--decay {decay:g}: expected a share from 0 up to, but not including, 1, such as --decay 0.9")
    if recalibrate is not None and recalibrate < 1:
        raise SpecError(f"--recalibrate {recalibrate}: expected a number of images, such as --recalibrate 10000")


def _show(rows: list[Row]) -> None:
    shown = []
    for row in rows:
        how = row["method"] if row.get("decay") is None else f"{row['method']}, decay {row['decay']:g}"
        anew = row.get("recalibrated_images")
        how += f", statistics of {anew:,} images" if anew else ""
        steps = ", ".join(map(str, row["steps"]))
        accuracies = {key: f"{row[key]:.2%}" for key in ("top1", "top5")}
        shown.append({"weights": how, "steps": steps, **accuracies, "loss": row["loss"], "images": row["images"]})
    show_rows(shown, False)
    sys.stdout.flush()
