"""What `paceline bench` measures: a recipe's job on made-up images or real ones, without what speed does not need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.index import locate
from paceline.errors import PlanError, SpecError
from paceline.job import WHOLE, Job, check_folder, flag_words, plan_job, read_placement, read_recipe, read_words
from paceline.model.packages import check_packages
from paceline.probing import at_largest_side, made_augment
from paceline.progress import progress_bar
from paceline.reconcile import for_files, make_plan
from paceline.record import PLAN, stored_plan
from paceline.settings.augment import Augment, Mix
from paceline.settings.build import build
from paceline.settings.configurations import placement_of, stands_for
from paceline.settings.data import Data, Files, Made, likeness
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, dump, override, parse
from paceline.settings.recipe import Recipe
from paceline.training import timing
from paceline.training.selection import Selection, steps_to_evaluate
from paceline.user_code import load_user_code

LONGEST = (timing.MOST_BLOCKS + timing.AGREEING + 1) * timing.MOST_STEPS
"""No measurement takes more steps than this, so that a run of as many is long enough."""


@dataclass(frozen=True)
class BenchJob:
    """A job to measure, and what to say about it."""

    job: Job
    steps: int | None
    """Steps of the recipe as it is written; None where nobody knows how many images there are."""
    epochs: float
    notes: list[str]
    run: Path | None = None
    """The run that the weights come from."""

    @property
    def speaks(self) -> bool:
        """Whether this process prints, and not another replica."""
        return self.job.launch is None or self.job.launch.rank == 0


def train_job(
    name: str, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None
) -> BenchJob:
    """The job of a recipe that is long enough to be measured; without --data on synthetic images."""
    recipe, written = read_recipe(name, words)
    placement, placed = read_placement(placement_of(name) if page is None else page, words, replicas, device)
    is_counted = data is not None or locate.is_known(recipe.data) or getattr(recipe.data, "images", None) is not None
    recipe, folder, notes = _with_data(name, recipe, data, evaluating=False)
    recipe, more = _one_side(recipe)
    job = plan_job(name, recipe, placement, folder, written, placed)
    steps = job.plan.steps if is_counted else None
    longer = max(job.plan.epochs, math.ceil(LONGEST * recipe.global_batch / job.plan.epoch_images))
    plan = make_plan(
        recipe.model_copy(update={"epochs": float(longer)}), placement, job.machine, job.plan.network, job.launch
    )
    _check_code(recipe)
    return BenchJob(replace(job, plan=plan), steps, job.plan.epochs, stands_for(name) + notes + more)


def infer_job(
    name: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    which: str | None,
) -> BenchJob:  # fmt: skip
    """The job of evaluating a recipe's network, or a run's; without --data on synthetic images."""
    run = Path(name) if name is not None and (Path(name) / PLAN).is_file() else None
    if run is None:
        if which is not None:
            raise SpecError(f"--checkpoint {which}: a recipe has none; write a run folder in place of {name}")
        name, words = read_words(name, words)
        recipe, written = read_recipe(name, words)
        placement, placed = read_placement(placement_of(name) if page is None else page, words, replicas, device)
    else:
        name = str(run)
        recipe, written = stored_plan(run).recipe, Tree()
        placement, placed = _placement_of(run, words, page, replicas, device)
        steps_to_evaluate(run, Selection(which))  # what is missing is told before torch is loaded
    if placement.stages > 1:
        raise PlanError("bench infer measures a network in one piece; write on.stages=1 on.splits=[]")
    recipe, folder, notes = _with_data(name, recipe, data, evaluating=True)
    notes += stands_for(name) if run is None else []
    if recipe.evaluate.flip:
        notes.append("evaluate.flip is on: each image is evaluated twice, mirrored too")
    _check_code(recipe)
    job = plan_job(name, recipe, placement, folder, written, placed)
    return BenchJob(job, None, job.plan.epochs, notes, run)


def _placement_of(
    run: Path, words: list[str], page: str | None, replicas: int | None, device: str | None
) -> tuple[Placement, Tree]:
    """The placement of a run with words in place of what it had; its layout is left to this machine."""
    if page is not None:
        return read_placement(page, words, replicas, device)
    placed = parse(dump(stored_plan(run).placement), str(run))
    for word in ["on.replicas=auto", *WHOLE, "on.micro_batch=auto", *words, *flag_words(replicas, device)]:
        if not word.startswith("on."):
            raise SpecError(f"'{word}': a run keeps its recipe; only on.* words may change, such as on.precision=bf16")
        override(placed, word, Placement, prefix="on.")
    return build(Placement, placed), placed


def _with_data(name: str, recipe: Recipe, data: Path | None, evaluating: bool) -> tuple[Recipe, Path | None, list[str]]:
    """The recipe on the images to measure with, their folder if they have one, and notes on what was left out."""
    check_folder(name, recipe.data, data)
    notes, folder = list[str](), None
    settings: Data
    if data is None:
        settings, notes = synthetic(name, recipe.data, evaluating)
    else:
        counted = recipe.data
        if isinstance(counted, Files):
            counted = counted.model_copy(update={"images": None, "validation_images": None})
        with progress_bar() as progress:
            settings, folder = locate.locate(counted, data, progress)
    changes: dict[str, Any] = {
        "data": settings,
        "average": recipe.average.model_copy(update={"last": None}),  # at the end of a run, which no bench comes to
    }
    if recipe.init.from_ is not None:
        changes["init"] = recipe.init.model_copy(update={"from_": None})
        notes.append("left out, as weights do not change the speed: init.from")
    if evaluating:
        changes |= {"augment": Augment(), "mix": Mix()}  # these are for training
    elif isinstance(settings, Made):
        cropped = ["augment.crop"] if isinstance(recipe.data, Files) else []
        if unused := dict.fromkeys([*cropped, *for_files(recipe.augment)]):
            changes["augment"] = made_augment(recipe)
            notes.append(f"left out, as only images in files need it: {', '.join(unused)}")
    return recipe.model_copy(update=changes), folder, notes


def synthetic(name: str, data: Data | None, evaluating: bool = False) -> tuple[Made, list[str]]:
    """Synthetic images of the same side and number of classes as a recipe's own, and notes on what is not known."""
    if data is None:
        raise SpecError(
            f"{name} leaves its data open; write --data FOLDER, or its numbers: data.name=synthetic data.side=224 "
            "data.classes=1000"
        )
    if isinstance(data, Made):
        return data, []
    made = Made(**{**likeness(data), "name": "synthetic", "validation_images": 1_000})
    if evaluating:
        made = made.model_copy(update={"side": made.evaluation_side or made.side, "evaluation_side": None})
    return made, _unknown(data, evaluating) if isinstance(data, Files) else []


def _unknown(data: Files, evaluating: bool) -> list[str]:
    """Notes on the numbers that only the files tell."""
    notes, facts = list[str](), data.known
    if not facts.classes:
        notes.append(
            "nobody knows how many classes there are, so 1,000 are taken; write data.classes=N, or --data FOLDER"
        )
    if not facts.images and not evaluating:
        notes.append(
            "nobody knows how many images there are, so no time is predicted; write data.images=N, or --data FOLDER"
        )
    return notes


def _one_side(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with its largest image side from the first step on, and a note if it had several."""
    changed, sides = at_largest_side(recipe), recipe.augment.side
    largest = changed.augment.side.get("0%", recipe.data.facts.side if recipe.data else 0)
    note = (
        f"the image side changes during this run; measured is its largest, {largest}, so the run takes less than the "
        "predicted time"
    )
    return changed, [note] if {*sides.values(), largest} != {largest} else []


def _check_code(recipe: Recipe) -> None:
    """Refuse what is not installed, before torch is loaded."""
    if recipe.augment.python is not None:
        load_user_code("augment.python", recipe.augment.python)
    check_packages(recipe)
