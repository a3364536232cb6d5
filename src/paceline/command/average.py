"""paceline average: one network from a run's saved checkpoints, judged beside the last of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import checkpoint
from paceline.command.resume import stored_job
from paceline.command.tables import counted, show_rows, tell
from paceline.errors import RunError, SpecError
from paceline.job import Job, run_replicas
from paceline.record import Row, Run, json_text

if TYPE_CHECKING:
    from paceline.training.averaging import Blended, Method

_ROOM = 20
"""Letters for the steps of an average in a table that fits 80 columns."""


def run(
    folder: Path, words: list[str], last: int | None, decay: float | None, recalibrate: int | None, data: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Average, judge, write RUN/averaged and print what came out beside the last checkpoint."""
    _check(last, decay, recalibrate)
    job = stored_job(folder, ["on.replicas=auto", "on.micro_batch=auto", *words], data)
    steps_to_average(folder, last)  # what is not there is told before torch is loaded
    started = run_replicas(job)
    if started is not None:
        return started
    from paceline.training.averaging import Method

    rows = make(job, Run(folder, writer=False), last, Method(decay, recalibrate))
    if job.launch is None or job.launch.rank == 0:
        if as_json:
            print(json_text(rows[-1], indent=1))
        else:
            _show(rows, last)
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


def make(job: Job, run: Run, last: int | None, method: Method) -> list[Row]:
    """The last checkpoint judged, then the average of all."""
    from paceline.data.load.loader import open_loader
    from paceline.training.averaging import Blended, average
    from paceline.training.evaluate import judge
    from paceline.training.restore import give
    from paceline.training.session import settle_torch
    from paceline.training.state import fresh
    from paceline.world import init_world

    plan = job.plan
    settle_torch(plan)
    world = init_world(plan, job.launch)
    loader = open_loader(plan, job.data_folder, world.replica, world.device)
    state = fresh(plan, world)
    run.writer = world.first
    made = _blended(run, last, method) if world.first else Blended()
    made.steps = world.broadcast_object(made.steps)
    give(world, state, made.steps[-1], made.last if world.first else None)
    found = judge(plan, world, state, loader)
    row = average(plan, world, run, state, loader, made, method, found["top1"])
    world.barrier()
    world.close()
    what = "last, moving average" if found.get("averaged") else "last checkpoint"
    before: Row = {"method": what, "steps": made.steps[-1:], **found}
    return [before, {key: value for key, value in row.items() if key != "kind"}]


def _blended(run: Run, last: int | None, method: Method) -> Blended:
    """The checkpoints as one network; where a run that trains removes one of them meanwhile, they are chosen anew."""
    from paceline.training.averaging import Blended, read_and_blend
    from paceline.training.restore import AGAIN, removed

    made = Blended()
    for _ in range(AGAIN):
        steps = steps_to_average(run.folder, last)
        made = read_and_blend(run, steps, method)
        if not removed(run.checkpoints, [step for step in steps if step not in made.steps]):
            break
    for fault in made.faults:
        tell(f"passed over: {fault}")
    if not made.steps:
        raise RunError(
            f"{run.folder}: no checkpoint of a trained step is whole; go on with: paceline resume {run.folder}"
        )
    return made


def _check(last: int | None, decay: float | None, recalibrate: int | None) -> None:
    if last is not None and decay is not None:
        raise SpecError("--last and --decay: write one; --last N is the mean of N, --decay D weighs all that are kept")
    if last is not None and last < 1:
        raise SpecError(f"--last {last}: expected how many checkpoints to average, such as --last 5")
    if decay is not None and not 0 <= decay < 1:
        raise SpecError(f"--decay {decay:g}: expected a share from 0 up to, but not including, 1, such as --decay 0.9")
    if recalibrate is not None and recalibrate < 1:
        raise SpecError(f"--recalibrate {recalibrate}: expected a number of images, such as --recalibrate 10000")


def _show(rows: list[Row], last: int | None) -> None:
    shown = [
        {"weights": _how(row), "steps": _steps(row["steps"])}
        | {key: row[key] for key in ("top1", "top5", "loss", "images")}
        for row in rows
    ]
    show_rows(shown, as_json=False)
    steps, anew = rows[-1]["steps"], rows[-1]["recalibrated_images"]
    if anew:
        print(f"\nRunning statistics are those of {counted(anew, 'training image')}.")
    if len(steps) == 1:
        more = "write a larger --last" if last == 1 else "train with a larger on.keep_last"
        print(f"\nThis is the checkpoint of step {steps[0]} alone; to average several, {more}.")
    sys.stdout.flush()


def _how(row: Row) -> str:
    return str(row["method"]) if row.get("decay") is None else f"{row['method']}, decay {row['decay']:g}"


def _steps(steps: list[int]) -> str:
    """All of them, or the first and the last of more than a table has room for."""
    listed = ", ".join(map(str, steps))
    return listed if len(listed) <= _ROOM else f"{steps[0]} to {steps[-1]} ({len(steps)})"
