"""paceline average: averages a run's checkpoints and evaluates the result beside the last one."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.command.tables import show_rows
from paceline.errors import PlanError, SpecError
from paceline.evaluating import check_validated
from paceline.job import WHOLE, stored_job
from paceline.progress import notify
from paceline.record import Row, json_text
from paceline.training.selection import steps_to_average
from paceline.visible import plural
from paceline.worker import run_verb

_ROOM = 20
"""Letters for the steps of an average in a table that fits 80 columns."""


def run(
    folder: Path, words: list[str], last: int | None, decay: float | None, recalibrate: int | None, data: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Average, evaluate, write RUN/averaged and print the result beside the last checkpoint's."""
    _check(last, decay, recalibrate)
    job = stored_job(folder, ["on.replicas=auto", *WHOLE, "on.micro_batch=auto", *words], data)
    if job.plan.stages > 1:
        raise PlanError("an average is evaluated in one piece; leave on.stages out")
    check_validated(job, "an average is evaluated too, and cannot be here")
    steps_to_average(folder, last)  # what is missing is told before torch is loaded
    rows, notes = run_verb("average", job, folder, last=last, decay=decay, recalibrate=recalibrate)
    if job.launch is None or job.launch.rank == 0:
        for note in notes:
            notify(note)
        if as_json:
            print(json_text(rows[-1], indent=1))
        else:
            _show(rows, last)
            averaged = folder / "averaged"
            print(f"\n{averaged}; train from it with init.from={averaged / 'network.safetensors'}")
    return 0


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
    table = [
        {"weights": _how(row), "steps": _steps(row["steps"])}
        | {key: row[key] for key in ("top1", "top5", "loss", "images")}
        for row in rows
    ]
    show_rows(table, as_json=False)
    steps, anew = rows[-1]["steps"], rows[-1]["recalibrated_images"]
    if anew:
        print(f"\nRunning statistics are those of {plural(anew, 'training image')}.")
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
