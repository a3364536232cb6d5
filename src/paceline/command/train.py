"""paceline train: trains a recipe on this machine, into a run folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from paceline.command.notes import describe_found, index_of, notes_of
from paceline.command.tables import show_line
from paceline.errors import RanOut, RunError
from paceline.job import Asked, Job, ask, check_apart, make_job, prepare_folder
from paceline.machine import check_torch_build
from paceline.model.packages import check_packages
from paceline.record import Run
from paceline.settings.data import Files
from paceline.sink import check_sinks
from paceline.user_code import load_user_code
from paceline.visible import one_line
from paceline.worker import run_verb


def run(
    recipe: str | None,
    words: list[str],
    data: Path | None,
    out: Path | None,
    page: str | None,
    replicas: int | None,
    device: str | None,
) -> int:
    """Train; a folder that holds the same recipe is continued."""
    job, folder = begin(recipe, words, data, out, page, replicas, device)
    try:
        return int(run_verb("train", job, folder, command=sys.argv[1:]))
    except RanOut:
        if job.launch is not None:  # who starts again what has ended
            raise
        start_again([] if out else ["--out", str(folder)])


def start_again(more_words: list[str]) -> NoReturn:
    """Run this command once more in place of this process, to have all of the device's memory again; the run folder
    remembers the micro-batch that was too large."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline", *sys.argv[1:], *more_words])


def begin(
    recipe: str | None,
    words: list[str],
    data: Path | None,
    out: Path | None,
    page: str | None,
    replicas: int | None,
    device: str | None,
) -> tuple[Job, Path]:
    """The job of a training and its run folder, ready to train."""
    check_apart(out, data)
    asked = ask(recipe, words, data)
    job = make_job(asked.name, asked.words, asked.data, page, replicas, device, choices=asked.choices)
    if out is None and job.launch is not None and job.launch.count > 1:
        raise RunError("several processes were started: write --out FOLDER, so that they mean the same run")
    folder = out or _new_folder(asked)
    check_apart(folder, job.data_folder if isinstance(job.plan.data, Files) else asked.data)
    # A wrong name, or a package that is missing, should not cost a run folder.
    if (function := job.plan.recipe.augment.python) is not None:
        load_user_code("augment.python", function)
    check_packages(job.plan.recipe)
    check_sinks(job.plan.placement)
    check_torch_build(job.plan.placement.device)
    if job.launch is None or job.launch.rank == 0:
        prepare_folder(job, folder)
        _tell(job)
    refuse_folder_in_use(folder, job.launch is None)
    return job, folder


def _new_folder(asked: Asked) -> Path:
    """A run folder named after the images or the recipe, and the time."""
    name = asked.data.resolve().name if asked.choices and asked.data else asked.name.removesuffix(".yaml")
    return Path("runs") / f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def _tell(job: Job) -> None:
    """Say what the images are, what was chosen for them, and in one line what was hardly meant."""
    index = index_of(job)
    notes, lines = notes_of(job, index), []
    if index is not None:
        lines.append(f"{job.data_folder}: {describe_found(index)}")
    if job.choices:
        words = " ".join(choice.word for choice in job.choices)
        lines.append(f"chosen: {words} (paceline plan {job.data_folder} says why)")
    if notes:
        lines.append(f"{'note' if len(notes) == 1 else 'notes'}: {'; '.join(notes)}")
    for line in lines:
        show_line(one_line(line))


def refuse_folder_in_use(folder: Path, alone: bool) -> None:
    """Refuse a folder that somebody trains in, many seconds before torch is loaded."""
    if alone:
        Run(folder, "own").close()
