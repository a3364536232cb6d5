"""The jobs of a run that only evaluate it: on its own images, on others, or its network alone; without torch."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DataError, RunError
from paceline.job import WHOLE, Job, plan_job, recipe_stays, stored_job
from paceline.machine import check_torch_build
from paceline.record import stored_plan
from paceline.settings.build import build
from paceline.settings.data import Center, Data, Files
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, dump, override, parse

_ALONE = (
    "on.replicas=1", *WHOLE, "on.micro_batch=auto", "on.graphs=auto", "on.data_on_device=auto",
    "on.decoded_validation=false", "on.offload=none",
)  # fmt: skip
"""What a placement keeps of training, or of the run's own data, and a network that is used alone has no need of."""


def evaluation_job(folder: Path, words: list[str], data: Path | None, test: Path | None = None) -> Job:
    """The job of evaluating a run, which needs none of the layout that training had: what is not asked for, this
    machine decides."""
    layout = ["on.replicas=auto", *WHOLE, "on.micro_batch=auto", "on.offload=none"]
    job = stored_job(folder, [*layout, *words], data, test, evaluates=True)
    check_validated(job, "evaluate others with --test FOLDER")
    return job


def check_validated(job: Job, remedy: str) -> None:
    """Refuse a run without validation images."""
    if not job.plan.facts.validation_images:
        raise DataError(f"{job.name}: its data have no validation images; {remedy}")


def network_job(folder: Path, words: list[str], images: int | None = None) -> Job:
    """The job of a run's trained network, without the run's data: on one replica, for so many images in files.

    What decides the batch of a validation stays as it is, so that the same images give the same bits.
    """
    stored = stored_plan(folder)
    placed = parse(dump(stored.placement), str(folder))
    for word in [*_ALONE, *words]:
        if not word.startswith("on."):
            raise recipe_stays(word, "on.precision=fp32")
        override(placed, word.removeprefix("on."), Placement)
    data = _as_files(folder, stored.recipe.data, images)
    augment = stored.recipe.augment.model_copy(update={"pad": 0, "python": None})
    evaluate = stored.recipe.evaluate.model_copy(update={"limit": None})
    recipe = stored.recipe.model_copy(update={"data": data, "augment": augment, "evaluate": evaluate})
    job = plan_job(str(folder), recipe, build(Placement, placed), None, Tree(), placed, tuple(words), evaluates=True)
    check_torch_build(job.plan.placement.device)
    return job


def _as_files(folder: Path, data: Data | None, images: int | None) -> Files:
    """The settings by which images in files are evaluated as a run's validation images are."""
    assert data is not None, "plan.yaml names the data that were found"
    counts = {} if images is None else {"validation_images": images}
    if isinstance(data, Files):
        return data.model_copy(update=counts)
    facts = data.facts
    if facts.channels != 3:
        raise RunError(f"{folder}: takes images of {facts.channels} channels, and those in files have 3")
    return Files(
        name="images", side=facts.side, evaluation=Center(name="center", short=facts.side), images=facts.images,
        validation_images=images or facts.validation_images, classes=facts.classes, mean=data.mean, std=data.std,
        normalize=data.normalize,
    )  # fmt: skip
