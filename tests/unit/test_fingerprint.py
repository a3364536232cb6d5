"""A run keeps its data: the same images in another format are the same, others are not, whatever their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from image_files import clean_pictures, every_pitfall, file_plan, write_every_format
from paceline import checkpoint
from paceline.data.index.fingerprint import FINGERPRINT, write_fingerprint
from paceline.errors import DataError, RunError, SpecError
from paceline.job import Job, plan_job, prepare_folder, stored_job
from paceline.record import Run, stored_plan
from paceline.settings.data import Files
from paceline.settings.read import Tree


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The same images in every format."""
    write_every_format(clean_pictures(40), tmp_path / "data", classes=10)
    return tmp_path / "data"


def job_of(data: Path, *words: str) -> Job:
    plan = file_plan(data, *words)
    tree = Tree({}, {(): "test"})
    return plan_job("test", plan.recipe, plan.placement, data, tree, tree)


def a_training_image(data: Path) -> Path:
    return min(path for path in (data / "train").rglob("*") if path.is_file())


@pytest.mark.parametrize("now", ["folder", "tfrecord", "webdataset", "pack"])
def test_the_same_images_in_any_format_go_on(sources: Path, tmp_path: Path, now: str) -> None:
    prepare_folder(job_of(sources / "folder"), tmp_path / "run")
    kept = json.loads((tmp_path / "run" / FINGERPRINT).read_text())
    assert len(kept["classes"]) == 10
    again = stored_job(tmp_path / "run", [], sources / now)
    assert again.plan.facts == job_of(sources / "folder").plan.facts


@pytest.mark.parametrize("change", ["renamed", "moved", "removed", "added"])
def test_other_images_or_labels_are_refused(sources: Path, tmp_path: Path, change: str) -> None:
    data, run = sources / "folder", tmp_path / "run"
    prepare_folder(job_of(data), run)
    checkpoint.write(run / "checkpoints", 1, {})
    image = a_training_image(data)
    other = next(place for place in sorted((data / "train").iterdir()) if place != image.parent)
    if change == "added":
        (other / "more.JPEG").write_bytes(image.read_bytes())
    elif change == "removed":
        image.unlink()
    else:
        image.rename(image.with_name("zzz.JPEG") if change == "renamed" else other / image.name)
    images = len([path for path in (data / "train").rglob("*") if path.is_file()])
    what = f"{images} instead of" if change in ("removed", "added") else "other names, labels or another order"
    with pytest.raises(RunError, match=rf"not the training images that .*run began with: {what}.*init\.from="):
        stored_job(run, [], data)
    with pytest.raises(RunError, match=r"init\.from="):
        prepare_folder(job_of(data), run)


def test_a_run_without_a_step_gives_its_folder_to_another_recipe(sources: Path, tmp_path: Path) -> None:
    data, run = sources / "folder", tmp_path / "run"
    prepare_folder(job_of(data), run)
    checkpoint.write(run / "checkpoints", 0, {})
    started = Run(run, "own")
    with pytest.raises(RunError, match="holds a run of another recipe"):  # it is being trained
        prepare_folder(job_of(data, "epochs=2"), run)
    started.close()
    prepare_folder(job_of(data, "epochs=2"), run)
    assert stored_plan(run).recipe.epochs == 2
    assert checkpoint.saved_steps(run / "checkpoints") == []
    checkpoint.write(run / "checkpoints", 1, {})
    with pytest.raises(RunError, match=r"holds a run of another recipe; epochs: 2.* -> 3.*init\.from="):
        prepare_folder(job_of(data, "epochs=3"), run)
    prepare_folder(job_of(data, "epochs=2"), run)  # the same one goes on
    assert checkpoint.saved_steps(run / "checkpoints") == [1]


def test_a_run_may_give_up_later_than_it_began_to(sources: Path, tmp_path: Path) -> None:
    prepare_folder(job_of(sources / "folder"), tmp_path / "run")
    data = stored_job(tmp_path / "run", ["data.max_bad=50%", "on.micro_batch=8"], None).plan.data
    assert isinstance(data, Files)
    assert data.max_bad == 0.5
    with pytest.raises(SpecError, match=r"only on\.\* words may change"):
        stored_job(tmp_path / "run", ["data.side=32"], None)


def test_data_that_are_gone_are_named(sources: Path, tmp_path: Path) -> None:
    prepare_folder(job_of(sources / "folder"), tmp_path / "run")
    (sources / "folder").rename(sources / "elsewhere")
    with pytest.raises(DataError, match=r"folder: the data of .*run were here and are gone; write --data"):
        stored_job(tmp_path / "run", [], None)
    assert stored_job(tmp_path / "run", [], sources / "elsewhere").data_folder == sources / "elsewhere"


@pytest.mark.parametrize(
    ("max_bad", "images", "allowed"),
    [
        (None, 1, 1),
        (None, 24, 3),
        (None, 120, 10),
        (None, 9_000, 10),
        (None, 1_331_167, 1_332),
        (0.0, 500, 0),
        (0.1, 50, 5),
    ],
)
def test_few_damaged_images_never_end_a_run(max_bad: float | None, images: int, allowed: int) -> None:
    assert Files(name="images", max_bad=max_bad).bad_allowed(images) == allowed


def test_labels_outside_the_classes_are_alike_in_every_format(tmp_path: Path) -> None:
    every_pitfall(100, tmp_path)
    labels = ("data.labels=labels.csv", "data.first_label=0")
    kept = []
    for form in ("folder", "tfrecord", "webdataset", "pack"):
        (tmp_path / "runs" / form).mkdir(parents=True)
        data = file_plan(tmp_path / form, *(labels if form != "pack" else ())).data
        write_fingerprint(tmp_path / "runs" / form, data, tmp_path / form)
        made = json.loads((tmp_path / "runs" / form / FINGERPRINT).read_text())
        kept.append((made["training"], made["validation"]))
    assert kept[1:] == kept[:-1]
