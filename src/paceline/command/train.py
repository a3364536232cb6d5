"""paceline train: trains a recipe on this machine, into a run folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from paceline.errors import RunError
from paceline.job import Job, check_apart, make_job, prepare_folder, read_words
from paceline.model.packages import check_packages
from paceline.record import Run
from paceline.user_code import load_user_code
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
    return int(run_verb("train", job, folder, command=sys.argv[1:]))


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
    name, words = read_words(recipe, words)
    job = make_job(name, words, data, page, replicas, device)
    if out is None and job.launch is not None and job.launch.count > 1:
        raise RunError("several processes were started: write --out FOLDER, so that they mean the same run")
    folder = out or Path("runs") / f"{name.removesuffix('.yaml').replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    # A wrong name, or a package that is missing, should not cost a run folder.
    if (function := job.plan.recipe.augment.python) is not None:
        load_user_code("augment.python", function)
    check_packages(job.plan.recipe)
    if job.launch is None or job.launch.rank == 0:
        prepare_folder(job, folder)
    refuse_folder_in_use(folder, job.launch is None)
    return job, folder


def refuse_folder_in_use(folder: Path, alone: bool) -> None:
    """Refuse a folder that somebody trains in, many seconds before torch is loaded."""
    if alone:
        Run(folder, "own").close()
