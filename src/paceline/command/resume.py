"""paceline resume: go on with a run from its newest whole checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.data.index import locate
from paceline.data.index.fingerprint import check_identity, trained_classes
from paceline.errors import DataError, RunError, SpecError
from paceline.job import Job, flag_words, plan_job, run_job, tell_progress
from paceline.record import Stored, stored_plan
from paceline.settings.build import build
from paceline.settings.data import Data, Files
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, dump, override, parse
from paceline.settings.recipe import Recipe


def run(folder: Path, words: list[str], data: Path | None, replicas: int | None, device: str | None) -> int:
    """Go on; only on.* words may differ from the first start."""
    return run_job(stored_job(folder, [*words, *flag_words(replicas, device)], data), folder, sys.argv[1:])


def stored_job(folder: Path, words: list[str], data: Path | None, test: Path | None = None) -> Job:
    """The job of a run folder, on its own placement with on.* words in place of what was asked before; with `test`, one
    that judges the images of that folder."""
    stored = stored_plan(folder)
    began = stored.recipe if test is None else _without_labels(stored.recipe)
    written, placed = (parse(dump(part), str(folder)) for part in (began, stored.placement))
    for word in words:
        if word.startswith("on."):
            override(placed, word.removeprefix("on."), Placement)
        elif word.startswith("data.max_bad=") or (test and word.startswith(("data.labels=", "data.first_label="))):
            # Says when to give up, or how other images are labeled: nothing of what is learned.
            override(written, word, Recipe)
        else:
            raise SpecError(f"'{word}': a run keeps its recipe; only on.* words may change, such as on.micro_batch=64")
    recipe = build(Recipe, written)
    if test is not None:
        if data is not None:
            raise SpecError(f"--data {data} and --test {test}: the images of one of them can be judged; leave one out")
        recipe = recipe.model_copy(update={"data": _to_judge(folder, recipe.data, test)})
        return plan_job(str(folder), recipe, build(Placement, placed), test, Tree(), placed)
    try:
        found, place = locate.locate(_uncounted(recipe.data), _data_folder(folder, stored, data))
    except DataError as fault:
        if data is None or not data.is_dir():
            raise
        raise DataError(f"{fault}; others than the run's own are judged with validate --test {data}") from None
    check_identity(folder, found, place)
    recipe = recipe.model_copy(update={"data": found})
    return plan_job(str(folder), recipe, build(Placement, placed), place, Tree(), placed)


def _without_labels(recipe: Recipe) -> Recipe:
    """The same without the file of labels, which speaks of the run's own images."""
    data = recipe.data
    return recipe.model_copy(
        update={"data": data.model_copy(update={"labels": None})} if isinstance(data, Files) else {}
    )


def _to_judge(folder: Path, data: Data | None, test: Path) -> Files:
    """Other images than a run's own, with its classes."""
    names = trained_classes(folder)
    if not isinstance(data, Files) or names is None:
        raise RunError(f"--test {test}: {folder} was not trained on images in files, so no names of classes are known")
    if not test.is_dir():
        what = "this is a file; write the folder of the images" if test.is_file() else "there is no such folder"
        raise DataError(f"--test {test}: {what}")
    return locate.to_judge(data, names, test, tell_progress())


def _data_folder(folder: Path, stored: Stored, data: Path | None) -> Path | None:
    """Where the data are said to be, or where they were."""
    given = locate.given_folder(data)
    if data is not None or stored.data_folder is None:
        return given
    remembered = Path(stored.data_folder)
    if remembered.is_dir():
        return remembered
    if given is None:
        raise DataError(
            f"{remembered}: the data of {folder} were here and are gone; write --data FOLDER with the new place"
        )
    return given


def _uncounted(data: Data | None) -> Data | None:
    """The same without the numbers of images, which were found: that they are still the same images says more."""
    return data.model_copy(update={"images": None, "validation_images": None}) if isinstance(data, Files) else data
