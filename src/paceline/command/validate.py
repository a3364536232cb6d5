"""paceline validate: judge checkpoints of a run on its validation images; nothing of the training need be repeated."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from paceline import checkpoint
from paceline.command.job import Job, run_replicas
from paceline.command.resume import stored_job
from paceline.command.show import show_rows
from paceline.errors import RunError
from paceline.record import Run, best_step, latest, rows_of


def run(folder: Path, words: list[str], which: str | None, every: bool, data: Path | None, as_json: bool) -> int:
    """Judge the newest checkpoint, a chosen one, or all that were not judged yet; the record gets a row for each."""
    # Judging needs none of the layout that training had: what is not asked for, this machine decides.
    job = stored_job(folder, ["on.replicas=auto", "on.micro_batch=auto", *words], data)
    steps = steps_to_judge(folder, which, every)
    started = run_replicas(job)
    if started is not None:
        return started
    rows = judge(job, Run(folder, writer=False), steps)
    if job.launch is None or job.launch.rank == 0:
        if rows or as_json:
            show_rows(rows, as_json)
        else:
            print("every checkpoint of this run is judged already")
    return 0


def steps_to_judge(folder: Path, which: str | None, every: bool) -> list[int]:
    """The steps whose checkpoints are asked for."""
    saved = checkpoint.saved_steps(folder / "checkpoints")
    if not saved:
        raise RunError(f"{folder}: there is no checkpoint in this run yet")
    if every:
        done = {row["step"] for row in latest(rows_of(folder), "validation")}
        return [step for step in saved if step not in done]
    if which is None:
        return saved[-1:]
    if which == "best":
        best = best_step(rows_of(folder), saved)
        return saved[-1:] if best is None else [best]
    number = Path(which).name.removeprefix("step-")
    if not number.isdigit() or int(number) not in saved:
        there = ", ".join(map(str, saved))
        raise RunError(f"{folder}: there is no checkpoint of step '{which}'; there is {there}")
    return [int(number)]


def judge(job: Job, run: Run, steps: list[int]) -> list[dict[str, Any]]:
    """Evaluate each checkpoint and append what was found to the record."""
    from paceline.data.loader import open_loader
    from paceline.sink.csv import Csv
    from paceline.train.evaluate import judge as judge_state
    from paceline.train.session import settle_torch
    from paceline.train.state import fresh, restore
    from paceline.world import join

    plan = job.plan
    settle_torch(plan)
    world = join(plan, job.launch)
    steps = world.agree(steps)  # beside a run that trains, replicas may have seen different checkpoints
    loader = open_loader(plan, job.data_folder, world.replica, world.device)
    state = fresh(plan, world)
    run.writer = world.first
    rows = []
    for step in steps:
        name = checkpoint.name_of(step)
        try:
            files = checkpoint.read(run.checkpoints / name)
        except RunError as fault:
            if len(steps) == 1:
                raise
            print(f"passed over: {fault}", file=sys.stderr)
            continue
        restore(state, files, name)
        start = time.perf_counter()
        found = judge_state(plan, world, state, loader)
        seconds = time.perf_counter() - start
        rate = found["images"] / seconds
        where = {"device": plan.placement.device, "precision": plan.placement.precision}
        row = {"step": step, "epoch": plan.epoch(step), **found, "seconds": seconds, "images_per_second": rate, **where}
        rows.append(run.write("validation", **row))
    if world.first and run.try_lock():
        Csv(run.folder, run.rows(), plan.steps)
        run.close()
    world.close()
    return [{key: value for key, value in row.items() if key != "kind"} for row in rows]
