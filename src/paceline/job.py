"""What the commands share: from the words a person typed to a plan, without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.data.index import locate
from paceline.data.index.scan import Tell
from paceline.errors import DataError, RunError
from paceline.launch import Launch, launched
from paceline.machine import Machine, this_machine
from paceline.model import tables
from paceline.planning import Plan
from paceline.reconcile import make_plan
from paceline.record import Run
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.data import Data, Made, Shapes
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override
from paceline.settings.recipe import Recipe
from paceline.settings.schema import addresses

DEFAULT_RECIPE = "shapes/resnet8"


@dataclass(frozen=True)
class Job:
    """A plan and where its parts came from."""

    name: str
    plan: Plan
    asked: Placement
    data_folder: Path | None
    written: Tree
    placed: Tree
    machine: Machine
    launch: Launch | None


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
    return build(Recipe, written, [key for key in all_addresses() if key.startswith("on.")]), written


def read_placement(
    page: str | None, words: list[str], replicas: int | None = None, device: str | None = None
) -> tuple[Placement, Tree]:
    """A placement with the on.* words and flags that concern it."""
    placed = shipped.tree("placements", page) if page else Tree({}, {(): "placement"})
    for word in [*words, *flag_words(replicas, device)]:
        if word.startswith("on."):
            override(placed, word, Placement, prefix="on.")
    return build(Placement, placed, all_addresses()), placed


def all_addresses() -> list[str]:
    """Every word that can stand before a '=': the keys of a recipe, and those of a placement with on."""
    return [*addresses(Recipe), *(f"on.{key}" for key in addresses(Placement))]


def flag_words(replicas: int | None, device: str | None) -> list[str]:
    """The on.* words that --replicas and --device are short for."""
    flags = {"on.replicas": replicas, "on.device": device}
    return [f"{key}={value}" for key, value in flags.items() if value is not None]


def make_job(
    name: str, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    look: bool = True,
) -> Job:  # fmt: skip
    """Everything before torch: settings, data folder, machine, and the plan that follows.

    With `look` off, a data set whose facts the recipe gives is not looked for.
    """
    recipe, written = read_recipe(name, words)
    placement, placed = read_placement(page, words, replicas, device)
    check_folder(name, recipe.data, data)
    if look or data is not None or not locate.is_known(recipe.data):
        found, folder = locate.locate(recipe.data, locate.given_folder(data), tell_progress())
    else:
        assert recipe.data is not None
        found, folder = recipe.data, None
    for key in found.model_fields_set - (recipe.data.model_fields_set if recipe.data else set()):
        written.places["data", key] = "found"
    return plan_job(name, recipe.model_copy(update={"data": found}), placement, folder, written, placed)


def check_folder(name: str, data: Data | None, folder: Path | None) -> None:
    """Refuse a folder of --data that the recipe would pass over, and a file in its place."""
    if folder is not None and isinstance(data, Shapes | Made):
        raise DataError(
            f"--data {folder}: {name} draws its own images ({data.name}); for those in a folder write another recipe, "
            f"as in: paceline train images/resnet18 --data {folder}; or data=images after this one"
        )
    if folder is not None and folder.is_file():
        labels = f", and data.labels={folder.name} the file" if folder.suffix in (".csv", ".json") else ""
        raise DataError(
            f"{folder}: this is a file; --data takes the folder of the images, here {folder.parent}{labels}"
        )


def check_apart(out: Path | None, data: Path | None) -> None:
    """Refuse a run folder among the images, where the next look at them would find it."""
    if out is not None and data is not None and out.resolve().is_relative_to(data.resolve()):
        raise RunError(f"--out {out} is in the folder of the images, {data}; choose a folder outside it")


def plan_job(name: str, recipe: Recipe, placement: Placement, folder: Path | None, written: Tree, placed: Tree) -> Job:
    """The job of settings that are known; the recipe names its data."""
    assert recipe.data is not None
    data: Data = recipe.data
    machine, launch = this_machine(), launched()
    network = tables.network_facts(recipe.model, data.facts)
    plan = make_plan(recipe, placement, data, machine, network, launch)
    return Job(name, plan, placement, folder, written, placed, machine, launch)


def run_job(job: Job, folder: Path, words: list[str]) -> int:
    """Train in this process, or start the replicas; `words` is the command that each of them runs."""
    if job.launch is None:
        Run(folder, writer=True).close()  # a folder in use is refused here, many seconds before torch is loaded
    started = run_replicas(job, words)
    if started is not None:
        return started
    from paceline.training.session import work

    return work(job.plan, job.launch, job.machine, folder, job.data_folder, console())


def run_replicas(job: Job, words: list[str] | None = None) -> int | None:
    """Start this command once for each replica, unless there is one only or a launcher has done so."""
    if job.launch is not None or job.plan.replicas == 1:
        return None
    from paceline.world import start_replicas

    return start_replicas(job.plan.replicas, ["paceline", *(sys.argv[1:] if words is None else words)])


def tell_progress() -> Tell | None:
    """A bar for what takes a while before a plan stands; none where nobody looks."""
    if not sys.stderr.isatty():
        return None
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("")

    def tell(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)
        if done < total:
            bar.start()
        else:
            bar.stop()

    return tell


def console() -> Console:
    """The terminal; a pipe gets long lines whole."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
