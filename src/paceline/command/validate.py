"""paceline validate: judge checkpoints of a run on its validation images or others; no option need be repeated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import checkpoint
from paceline.command.resume import stored_job
from paceline.command.tables import show_rows, tell
from paceline.data.index.scan import open_index
from paceline.errors import RunError
from paceline.job import Job, run_replicas
from paceline.record import Row, Run, best_step, rows_of
from paceline.settings.data import Files

if TYPE_CHECKING:
    from paceline.training.state import State
    from paceline.world import World


@dataclass(frozen=True)
class Asked:
    """Which checkpoints are judged, and whether on other images than the run's own."""

    which: str | None = None
    every: bool = False
    test: Path | None = None

    @property
    def kind(self) -> str:
        """What the rows of the record are called."""
        return "validation" if self.test is None else "test"


def run(folder: Path, words: list[str], asked: Asked, data: Path | None, as_json: bool) -> int:
    """Judge the newest checkpoint, a chosen one, or all that were not judged yet; the record gets a row for each."""
    # Judging needs none of the layout that training had: what is not asked for, this machine decides.
    job = stored_job(folder, ["on.replicas=auto", "on.micro_batch=auto", *words], data, asked.test)
    steps_to_judge(folder, asked)  # what is not there is told before torch is loaded
    if asked.test and job.launch is None and isinstance(job.plan.data, Files):
        for note in open_index(job.plan.data, asked.test).notes:
            tell(note)
    started = run_replicas(job)
    if started is not None:
        return started
    rows = judge(job, Run(folder, writer=False), asked)
    if job.launch is None or job.launch.rank == 0:
        if as_json:
            show_rows(rows, as_json)
        elif rows:
            _show(rows)
        else:
            print("every checkpoint of this run is judged already")
    return 0


def steps_to_judge(folder: Path, asked: Asked) -> list[int]:
    """The steps whose checkpoints are asked for; where it is the newest, those that take its place if it is damaged."""
    saved = checkpoint.saved_steps(folder / "checkpoints")
    if not saved:
        raise RunError(f"{folder}: there is no checkpoint in this run yet")
    which = asked.which
    if asked.every:
        same = {"kind": asked.kind} | _place(asked)
        done = {row["step"] for row in rows_of(folder) if same.items() <= row.items()}
        return [step for step in saved if step not in done]
    if which is None:
        return saved[::-1]
    if which == "best":
        best = best_step(rows_of(folder), saved)
        return saved[::-1] if best is None else [best]
    number = Path(which).name.removeprefix("step-")
    if not number.isdigit() or int(number) not in saved:
        there = ", ".join(map(str, saved))
        raise RunError(f"{folder}: there is no checkpoint of step '{which}'; there is {there}")
    return [int(number)]


def judge(job: Job, run: Run, asked: Asked) -> list[Row]:
    """Evaluate each checkpoint and append what was found to the record."""
    from paceline.data.load.loader import open_loader
    from paceline.data.load.quarantine import QUARANTINE, quarantined
    from paceline.sink.csv import Csv
    from paceline.training.evaluate import judge as judge_state
    from paceline.training.session import settle_torch
    from paceline.training.state import fresh
    from paceline.world import init_world

    plan = job.plan
    settle_torch(plan)
    world = init_world(plan, job.launch)
    bad = run.folder / "test" if asked.test else None  # those of the run itself are listed where it was trained
    if bad:
        with suppress(OSError):  # where nothing can be written, the record says so
            bad.mkdir(exist_ok=True)
            if world.first:
                (bad / QUARANTINE).unlink(missing_ok=True)
    loader = open_loader(plan, job.data_folder, world.replica, world.device, bad)
    state = fresh(plan, world)
    run.writer = world.first
    rows = []
    for step in _each(world, run, state, asked):
        start = time.perf_counter()
        found = judge_state(plan, world, state, loader)
        seconds = time.perf_counter() - start
        rate = found["images"] / seconds
        where = {"device": plan.placement.device, "precision": plan.placement.precision} | _place(asked)
        row = {"step": step, "epoch": plan.epoch(step), **found, "seconds": seconds, "images_per_second": rate, **where}
        rows.append(run.write(asked.kind, **row))
    for image in quarantined(bad) if bad and world.first else []:
        tell(f"judged by a neighbor in its place: {image['name']}: {image['reason']}")
    if world.first and run.try_lock():
        Csv(run.folder, run.rows(), plan.steps)
        run.close()
    world.close()
    return [{key: value for key, value in row.items() if key != "kind"} for row in rows]


def _place(asked: Asked) -> Row:
    """What a row of the record says of other images than the run's own: where they are."""
    return {"data": str(asked.test.resolve())} if asked.test else {}


def _each(world: World, run: Run, state: State, asked: Asked) -> Iterator[int]:
    """The steps that are judged, the state being that of each; chosen here, where nothing slow comes any more.

    Beside a run that trains, checkpoints come and go, and replicas may see different ones: the first one reads.
    """
    from paceline.training.restore import first_whole, give, removed

    def choose() -> list[int]:
        return steps_to_judge(run.folder, asked)

    if not asked.every:
        step, files = first_whole(run.checkpoints, choose, tell) if world.first else (0, None)
        yield give(world, state, step, files)
        return
    for step in world.broadcast_object(choose() if world.first else []):
        files = None
        try:
            files = checkpoint.read(run.checkpoints / checkpoint.name_of(step)) if world.first else None
        except RunError as fault:
            gone = removed(run.checkpoints, [step])
            tell(
                f"passed over: step {step}, whose checkpoint was removed meanwhile" if gone else f"passed over: {fault}"
            )
        if world.broadcast_object(files is not None):
            yield give(world, state, step, files)


def _show(rows: list[Row]) -> None:
    """What people look for first; the record and --json have all."""
    images = f" {rows[0]['images']:,} images of {rows[0]['data']}" if "data" in rows[0] else ""
    print(f"judged{images} on {rows[0]['device']} in {rows[0]['precision']}")
    kept = ("step", "epoch", "top1", "top5", "loss", "images", "seconds", "images_per_second")
    shown = [{key: row[key] for key in kept} for row in rows]
    if "averaged" in rows[0]:
        for row, line in zip(rows, shown, strict=True):
            line["weights"] = "average" if row["averaged"] else "plain"
    show_rows(shown, as_json=False)
