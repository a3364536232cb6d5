"""paceline resume: continues a run from its newest intact checkpoint, or makes a longer run of it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from paceline import checkpoint
from paceline.command.tables import show_line
from paceline.command.train import refuse_folder_in_use, start_again
from paceline.errors import Damaged, RanOut, RunError, SpecError
from paceline.job import Job, check_apart, flag_words, plan_job, prepare_folder, stored_job
from paceline.progress import notify
from paceline.record import PLAN, Run, json_text, recipe_changes, rows_of, stored_plan
from paceline.settings.build import build
from paceline.settings.read import dump, override, parse
from paceline.settings.recipe import Recipe
from paceline.sink import check_sinks
from paceline.visible import one_line, plural
from paceline.worker import run_verb


def run(
    folder: Path,
    words: list[str],
    data: Path | None,
    replicas: int | None,
    device: str | None,
    until: str | None = None,
    out: Path | None = None,
) -> int:
    """Continue; only on.* words may differ from the first start, and with `until` the length, in another folder."""
    words = [*words, *flag_words(replicas, device)]
    if (until is None) != (out is None):
        raise SpecError("a run of another length is another run: write both --until 'N epochs' and --out NEW")
    if until is None or out is None:
        job = stored_job(folder, words, data)
        check_sinks(job.plan.placement)
    else:
        job = longer_job(folder, until, words, data)
        check_sinks(job.plan.placement)
        if job.launch is None or job.launch.rank == 0:
            continue_in(job, folder, out)
        folder = out
    refuse_folder_in_use(folder, job.launch is None)
    try:
        return int(run_verb("train", job, folder, command=sys.argv[1:]))
    except RanOut:
        if job.launch is not None:
            raise
        start_again([])


def longer_job(folder: Path, until: str, words: list[str], data: Path | None) -> Job:
    """The job of a run's recipe with another length."""
    job = stored_job(folder, words, data)
    written = parse(dump(job.plan.recipe), str(folder / PLAN))
    written.places = dict.fromkeys(written.places, str(folder / PLAN))  # its lines are others there
    override(written, f"epochs={until}", Recipe)
    recipe = build(Recipe, written)
    return plan_job(str(folder), recipe, job.asked, job.data_folder, written, job.placed, tuple(words))


def continue_in(job: Job, folder: Path, out: Path) -> None:
    """Make a run folder that begins where another run stands, whose own folder stays as it is.

    plan.yaml comes last: a folder without its checkpoint would begin anew.
    """
    check_apart(out, job.data_folder)
    if os.path.realpath(out) == os.path.realpath(folder):
        raise RunError(f"--out {out} is the run itself, which keeps its length; choose another folder")
    if not (out / PLAN).is_file():
        _begin_with_checkpoint(job, folder, out)
        prepare_folder(job, out)
        return
    origins = [row["run"] for row in rows_of(out) if row["kind"] == "continued"]
    if origins != [str(folder.resolve())] or recipe_changes(stored_plan(out).recipe, job.plan.recipe):
        raise RunError(f"{out}: holds another run; choose another folder with --out")


def _begin_with_checkpoint(job: Job, folder: Path, out: Path) -> None:
    """Take over the newest intact checkpoint of a run, and those before it that the end will average."""
    plan, saved = job.plan, folder / "checkpoints"
    newest = checkpoint.newest_intact(saved, lambda fault: notify(f"damaged, taking the one before it: {fault}"))
    if newest is None:
        raise RunError(
            f"{folder}: there is no intact checkpoint in this run; continue it with: paceline resume {folder}"
        )
    step, files = newest
    if step >= plan.steps:
        raise RunError(
            f"--until: {folder} has trained {plural(step, 'step')} ({plan.epoch(step):g} epochs), and this would be a "
            f"run of {plan.steps:,}; write more"
        )
    for earlier in {one for one in plan.averaged_steps if one < step} & set(checkpoint.saved_steps(saved)):
        with suppress(Damaged):  # the end says what is missing in its average
            _take_over(out, earlier, checkpoint.read(saved / checkpoint.name_of(earlier)), plan.recipe)
    _take_over(out, step, files, plan.recipe)
    was = stored_plan(folder).recipe.epochs
    with Run(out, "own") as run:
        if not run.rows():  # of a start that was killed here
            run.write("continued", run=str(folder.resolve()), step=step, epochs=[str(was), str(plan.recipe.epochs)])
    show_line(one_line(f"{folder} goes on after step {step:,} in {out}: epochs was {was} and is {plan.recipe.epochs}"))


def _take_over(out: Path, step: int, files: checkpoint.CheckpointFiles, recipe: Recipe) -> None:
    """Write a checkpoint of another length of the same run: what had ended that run does not end this one."""
    numbers = json.loads(files["state.json"])
    if numbers["stopping"]["reason"] is not None:
        numbers["stopping"] |= {"reason": None, "no_better": 0}
    changed = {"state.json": json_text(numbers).encode(), checkpoint.RECIPE: dump(recipe).encode()}
    checkpoint.write(out / "checkpoints", step, files | changed)
