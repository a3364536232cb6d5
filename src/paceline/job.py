"""From the words a person typed, or a run folder, to a plan that is ready to open; without torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline import checkpoint
from paceline.data.index import locate
from paceline.data.index.fingerprint import FINGERPRINT, check_fingerprint, trained_classes, write_fingerprint
from paceline.data.load.class_weights import class_weights
from paceline.data.load.quarantine import QUARANTINE
from paceline.errors import DataError, RunError, SpecError
from paceline.files import disk_faults, read_whole
from paceline.fitting import SCRATCH, Choice, choose
from paceline.launch import Launch, launched
from paceline.machine import Machine, this_machine
from paceline.model import tables
from paceline.model.sources import follow_source
from paceline.planning import Plan
from paceline.probing import planned
from paceline.progress import progress_bar
from paceline.ran_out import RAN_OUT
from paceline.record import (
    FOLLOWED,
    PLAN,
    RECORD,
    Run,
    Stored,
    recipe_changes,
    rows_of,
    store_plan,
    stored_plan,
    trained_step,
)
from paceline.settings import shipped
from paceline.settings.addresses import all_addresses
from paceline.settings.build import build
from paceline.settings.configurations import placement_of
from paceline.settings.data import Data, Files, Made, Shapes, likeness
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, cut, dump, override, parse
from paceline.settings.recipe import Recipe
from paceline.settings.suggest import COMPARE
from paceline.sink.log import LOG
from paceline.sink.mlflow import MLFLOW
from paceline.sink.tensorboard import EVENTS
from paceline.sink.wandb import WANDB

DEFAULT_RECIPE = "shapes/resnet8"


@dataclass(frozen=True)
class Job:
    """A plan and where its parts came from."""

    name: str
    plan: Plan
    asked: Placement
    """The placement as it was written, 'auto' included."""
    data_folder: Path | None
    written: Tree
    """Where each setting of the recipe was written."""
    placed: Tree
    """Where each setting of the placement was written."""
    machine: Machine
    launch: Launch | None
    words: tuple[str, ...] = ()
    """For the job of a run folder, the words that changed its settings."""
    test: Path | None = None
    """For a job that evaluates other images than the run's own, their folder."""
    choices: tuple[Choice, ...] = ()
    """What was chosen for the images, where no recipe was named."""


@dataclass(frozen=True)
class Asked:
    """What the words of a command ask for: a recipe, settings in place of its own, and a folder of images."""

    name: str
    words: list[str]
    data: Path | None
    choices: tuple[Choice, ...] = ()


def ask(recipe: str | None, words: list[str], data: Path | None) -> Asked:
    """What a command asks for that takes a recipe or a folder; for a folder alone, recipe and settings are chosen."""
    if recipe is not None and "=" in recipe:
        words, recipe = [recipe, *words], None
    elif recipe is not None and not shipped.is_page("recipes", recipe) and _is_place(recipe):
        if data is not None:
            raise SpecError(f"{recipe} and --data {data}: images are in one folder; leave one of them out")
        data, recipe = Path(os.path.expanduser(recipe)), None  # noqa: PTH111
    if recipe is not None:
        return Asked(recipe, words, data)
    folder = locate.given_folder(data)
    if folder is None or any(word.startswith(("data=", "data.name=")) for word in words):
        return Asked(DEFAULT_RECIPE, words, data)
    folder = locate.dataset_folder(folder)
    check_folder("", None, folder)
    written, _ = read_recipe(SCRATCH, words)  # refuses a wrong word before all files are looked at
    try:
        with progress_bar() as progress:
            choices = choose(folder, words, written, progress)
    except DataError as fault:
        if data is not None:
            raise
        raise DataError(f"{fault} (the folder is from {locate.set_variable()}; without it, this is the demo)") from None
    return Asked(choices[0].value, [*(choice.word for choice in choices[1:]), *words], folder, tuple(choices))


def _is_place(word: str) -> bool:
    """Whether a word is a path and not meant as a recipe's name; a run is neither."""
    path = Path(os.path.expanduser(word))  # noqa: PTH111
    if os.path.isfile(path / PLAN):  # noqa: PTH113
        raise SpecError(f"{word} is a run; write: paceline resume {word}")
    return os.path.exists(path) or word.startswith(("./", "../", "/", "~"))  # noqa: PTH110


def read_words(recipe: str | None, words: list[str]) -> tuple[str, list[str]]:
    """The recipe's name and the overrides; a first word with '=' is an override of the default recipe."""
    if recipe is None or "=" in recipe:
        return DEFAULT_RECIPE, [*([recipe] if recipe else []), *words]
    return recipe, words


def read_recipe(name: str, words: list[str]) -> tuple[Recipe, Tree]:
    """A recipe with the overrides that concern it."""
    written = shipped.tree("recipes", name)
    for word in words:
        if not word.startswith("on."):
            override(written, word, Recipe)
    recipe = build(Recipe, written, [key for key in all_addresses() if key.startswith("on.")])
    if isinstance(recipe.data, Made):
        own = build(Recipe, shipped.tree("recipes", name)).data
        recipe = recipe.model_copy(update={"data": _made_like(own, recipe.data, written)})
    return recipe, written


def _made_like(own: Data | None, made: Made, written: Tree) -> Made:
    """Made-up images in place of a recipe's own data, so that every step is the same but for what the pixels show."""
    if own is None or isinstance(own, Made):
        return made
    missing = {key: value for key, value in likeness(own).items() if key not in made.model_fields_set}
    for key in missing:
        written.places["data", key] = f"as {own.name} has it"
    return made.model_copy(update=missing)


def read_placement(
    page: str | None, words: list[str], replicas: int | None = None, device: str | None = None
) -> tuple[Placement, Tree]:
    """A placement with the on.* words and flags that concern it."""
    placed = shipped.tree("placements", page) if page is not None else Tree({}, {(): "placement"})
    for word in [*words, *flag_words(replicas, device)]:
        if word.startswith("on."):
            override(placed, word, Placement, prefix="on.")
    return build(Placement, placed, all_addresses()), placed


WHOLE = ["on.stages=1", "on.splits=[]"]
"""Words for what is done with a run's network in one piece, however it was trained."""


def flag_words(replicas: int | None, device: str | None) -> list[str]:
    """The on.* words that --replicas and --device are short for."""
    flags = {"on.replicas": replicas, "on.device": device}
    return [f"{key}={value}" for key, value in flags.items() if value is not None]


def make_job(
    name: str, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    look: bool = True, choices: tuple[Choice, ...] = (), launch: Launch | None = None,
) -> Job:  # fmt: skip
    """The job of a recipe: settings, data folder, machine, and the plan that follows.

    With `look` off, a data set whose facts the recipe gives is not looked for. `launch` is that of another machine.
    """
    recipe, written = read_recipe(name, words)
    for key, _, reason in choices[1:]:
        written.places[tuple(key.split("."))] = f"chosen: {reason}"
    placement, placed = read_placement(placement_of(name) if page is None else page, words, replicas, device)
    check_folder(name, recipe.data, data)
    recipe = recipe.with_paths(partial(_absolute, locate.given_folder(data)))
    if look or data is not None or not locate.is_known(recipe.data):
        with progress_bar() as progress:
            settings, folder = locate.locate(recipe.data, locate.given_folder(data), progress)
    else:
        assert recipe.data is not None
        settings, folder = recipe.data, None
    for key in settings.model_fields_set - (recipe.data.model_fields_set if recipe.data else set()):
        written.places["data", key] = "found"
    recipe = follow_source(recipe.model_copy(update={"data": settings}), written)
    job = plan_job(name, recipe, placement, folder, written, placed, launch=launch)
    if folder is not None or not locate.needs_files(settings):
        class_weights(job.plan, folder)  # refuses names that no class has
    return replace(job, choices=choices)


def _absolute(folder: Path | None, key: str, path: str) -> str:
    """A path that a run finds from anywhere; what lies inside the data folder is found there wherever that is, and what
    is no path, such as the name of published weights, stays as it is."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - Path would raise for a user who is not there
    inside = folder is not None and key != "init.from" and os.path.isfile(folder / path)  # noqa: PTH113
    return path if inside or not os.path.exists(expanded) else os.path.abspath(expanded)  # noqa: PTH100, PTH110


def check_folder(name: str, data: Data | None, folder: Path | None) -> None:
    """Refuse a folder of --data that the recipe would ignore, and a file in its place."""
    if folder is not None and isinstance(data, Shapes | Made):
        raise DataError(
            f"--data {folder}: {name} draws its own images ({data.name}); for those in a folder write no recipe, "
            f"as in: paceline train {folder}; or data=images after this one"
        )
    if folder is not None and _is_file(folder):
        labels = f", and data.labels={folder.name} the file" if folder.suffix in (".csv", ".json") else ""
        raise DataError(
            f"{folder}: this is a file; --data takes the folder of the images, here {folder.parent}{labels}"
        )


def _is_file(folder: Path) -> bool:
    with disk_faults(DataError, folder, "cannot be read"):
        return folder.is_file()


def check_apart(out: Path | None, data: Path | None) -> None:
    """Refuse a run folder among the images, where the next look at them would find it."""
    if out is not None and data is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(data)):
        raise RunError(f"--out {out} is in the folder of the images, {data}; choose a folder outside it")


def plan_job(
    name: str,
    recipe: Recipe,
    placement: Placement,
    folder: Path | None,
    written: Tree,
    placed: Tree,
    words: tuple[str, ...] = (),
    test: Path | None = None,
    evaluates: bool = False,
    launch: Launch | None = None,
) -> Job:
    """The job of settings that are known; the recipe names its data."""
    assert recipe.data is not None
    data: Data = recipe.data
    machine, launch = this_machine(), launch or launched()
    network = tables.network_facts(recipe.model, data.facts)
    plan = planned(recipe, placement, machine, network, launch, evaluates)
    return Job(name, plan, placement, folder, written, placed, machine, launch, words, test)


def prepare_folder(job: Job, folder: Path) -> None:
    """Make the run folder, or check that it holds the same recipe and data; a run without a step may be replaced."""
    if _is_begun(folder):
        try:
            _check_same(job, folder)
        except RunError:
            if not _cleared(folder):
                raise
        else:
            return
    with disk_faults(RunError, folder, "cannot be made", "choose another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
    store_plan(folder, job.plan, job.asked, job.data_folder, job.written, job.placed)
    write_fingerprint(folder, job.plan.data, job.data_folder)


def _is_begun(folder: Path) -> bool:
    """Whether a folder holds a run; one that cannot be read is not taken for none."""
    with disk_faults(RunError, folder / PLAN, "cannot be read", "choose another folder with --out"):
        try:
            read_whole(folder / PLAN)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _check_same(job: Job, folder: Path) -> None:
    changed = recipe_changes(stored_plan(folder).recipe, job.plan.recipe)
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RunError(
            f"{folder}: holds a run of another recipe; {changed[0]}{more}; choose another folder with --out, and begin "
            f"with the weights of this one, if you wish, by init.from={folder}"
        )
    check_fingerprint(folder, job.plan.data, job.data_folder)


def _cleared(folder: Path) -> bool:
    """Clear away a run that ended before any step was saved, unless somebody is training in its folder."""
    if any(checkpoint.saved_steps(folder / "checkpoints")) or trained_step(rows_of(folder)):
        return False
    with Run(folder, "read") as run:
        if not run.try_own():
            return False
        for name in (PLAN, RAN_OUT, RECORD, FOLLOWED, LOG, FINGERPRINT, QUARANTINE, WANDB, MLFLOW):
            (folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", EVENTS):
            shutil.rmtree(folder / name, ignore_errors=True)
    return True


def stored_job(
    folder: Path, words: list[str], data: Path | None, test: Path | None = None, evaluates: bool = False
) -> Job:
    """The job of a run folder, on its own placement with on.* words in place of what was asked before; one that only
    `evaluates` takes other words too, and with `test` the images of that folder."""
    stored = stored_plan(folder)
    began = stored.recipe if test is None else _without_labels(stored.recipe)
    written, placed = (parse(dump(settings), str(folder)) for settings in (began, stored.placement))
    for word in words:
        if word.startswith("on."):
            override(placed, word.removeprefix("on."), Placement)
        elif (
            word.startswith("data.max_bad=")
            or (evaluates and word.startswith("evaluate.limit="))
            or (test and word.startswith(("data.labels=", "data.first_label=")))
        ):
            # Says when to give up, or which images are evaluated and how they are labeled: nothing of what is learned.
            override(written, word, Recipe)
        else:
            raise recipe_stays(word, "on.micro_batch=64")
    recipe = build(Recipe, written)
    if test is not None:
        if data is not None:
            raise SpecError(f"--data {data} and --test {test}: only one of them can be evaluated; leave one out")
        settings: Data = _settings_to_evaluate(folder, recipe.data, test)
        place: Path | None = test
    else:
        try:
            settings, place = locate.locate(_uncounted(recipe.data), _data_folder(folder, stored, data))
        except DataError as fault:
            if data is None or not os.path.isdir(data):  # noqa: PTH112
                raise
            raise DataError(f"{fault}; evaluate other images than the run's own with validate --test {data}") from None
        check_fingerprint(folder, settings, place)
    recipe = recipe.model_copy(update={"data": settings})
    placement = build(Placement, placed)
    return plan_job(str(folder), recipe, placement, place, Tree(), placed, tuple(words), test, evaluates)


def recipe_stays(word: str, example: str) -> SpecError:
    """What is said of a word that changes no placement; one that sets nothing is most likely a second run."""
    if "=" not in word:
        compare = f"; to compare runs write {COMPARE}" if os.path.isfile(Path(word) / PLAN) else ""  # noqa: PTH113
        return SpecError(f"'{cut(word)}' is one word too many: name one run, and settings as {example}{compare}")
    return SpecError(f"'{cut(word)}': a run keeps its recipe; only on.* words may change, such as {example}")


def _without_labels(recipe: Recipe) -> Recipe:
    """The recipe without its files of labels, which are about the run's own images."""
    data = recipe.data
    own = {"labels": None, "relabel": None}
    return recipe.model_copy(update={"data": data.model_copy(update=own)} if isinstance(data, Files) else {})


def _settings_to_evaluate(folder: Path, data: Data | None, test: Path) -> Files:
    """Other images than a run's own, with its classes."""
    names = trained_classes(folder)
    if not isinstance(data, Files) or names is None:
        raise RunError(f"--test {test}: {folder} was not trained on images in files, so no names of classes are known")
    if not os.path.isdir(test):  # noqa: PTH112
        what = (
            "this is a file; write the folder of the images"
            if _is_file(test)
            else "there is no such folder; write one with the images of each class in a folder"
        )
        raise DataError(f"--test {test}: {what}")
    with progress_bar() as progress:
        return locate.evaluation_files(data, names, test, progress)


def _data_folder(folder: Path, stored: Stored, data: Path | None) -> Path | None:
    """Where the data are said to be, or where they were."""
    given = locate.given_folder(data)
    if data is not None or stored.data_folder is None:
        return given
    remembered = Path(stored.data_folder)
    if os.path.isdir(remembered):  # noqa: PTH112 - where it may not be looked into, it is gone, too
        return remembered
    if given is None:
        raise DataError(
            f"{remembered}: the data of {folder} were here and are gone; write --data FOLDER with the new place"
        )
    return given


def _uncounted(data: Data | None) -> Data | None:
    """The data without the numbers of images, which were found: that they are still the same images says more."""
    return data.model_copy(update={"images": None, "validation_images": None}) if isinstance(data, Files) else data
