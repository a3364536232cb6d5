"""paceline train: a recipe on this machine, into a run folder."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from paceline import checkpoint
from paceline.data.index.fingerprint import IDENTITY, check_identity, keep_identity
from paceline.data.load.quarantine import QUARANTINE
from paceline.errors import RunError
from paceline.job import Job, check_apart, make_job, read_words, run_job
from paceline.record import LOG, PLAN, RECORD, Run, store_plan, stored_plan
from paceline.settings import build
from paceline.user_code import own_function


def run(
    recipe: str | None,
    words: list[str],
    data: Path | None,
    out: Path | None,
    page: str | None,
    replicas: int | None,
    device: str | None,
) -> int:
    """Train; on a folder that holds the same recipe, go on with it."""
    check_apart(out, data)
    name, words = read_words(recipe, words)
    job = make_job(name, words, data, page, replicas, device)
    if out is None and job.launch is not None and job.launch.count > 1:
        raise RunError("several processes were started: write --out FOLDER, so that they mean the same run")
    folder = out or Path("runs") / f"{name.removesuffix('.yaml').replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    own_function(job.plan.recipe.augment.python)  # a wrong name should not cost a run folder
    if job.launch is None or job.launch.rank == 0:
        prepare_folder(job, folder)
    again = sys.argv[1:] if out else [*sys.argv[1:], "--out", str(folder)]
    return run_job(job, folder, again)


def prepare_folder(job: Job, folder: Path) -> None:
    """Make the run folder, or check that it holds the same recipe and data; a run without a step may be replaced."""
    if (folder / PLAN).is_file():
        try:
            _check_same(job, folder)
        except RunError:
            if not _cleared(folder):
                raise
        else:
            return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise RunError(f"{folder}: cannot be made: {fault.strerror}; choose another folder with --out") from None
    store_plan(folder, job.plan, job.asked, job.data_folder, job.written, job.placed)
    keep_identity(folder, job.plan.data, job.data_folder)


def _check_same(job: Job, folder: Path) -> None:
    changed = build.differences(stored_plan(folder).recipe, job.plan.recipe)
    changed = [line for line in changed if not line.startswith(("about:", "published:", "source:"))]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RunError(
            f"{folder}: holds a run of another recipe; {changed[0]}{more}; choose another folder with --out, and begin "
            f"with the weights of this one, if you wish, by init.from={folder}"
        )
    check_identity(folder, job.plan.data, job.data_folder)


def _cleared(folder: Path) -> bool:
    """Clear away a run that ended before any step was saved, unless somebody is training in its folder."""
    if any(checkpoint.saved_steps(folder / "checkpoints")):
        return False
    run = Run(folder, writer=False)
    if not run.try_lock():
        return False
    for name in (PLAN, RECORD, LOG, IDENTITY, QUARANTINE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    run.close()
    return True
