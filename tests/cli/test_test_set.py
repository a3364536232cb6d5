"""paceline validate --test: other labeled images than the run's own, with its classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from conftest import Paceline, run_in
from image_files import PAGE, clean_pictures, write_every_format
from paceline import checkpoint
from paceline.command import validate
from paceline.data.index.locate import evaluation_files, locate
from paceline.data.index.scan import open_index
from paceline.data.load.quarantine import quarantined
from paceline.errors import DataError, RunError, SpecError
from paceline.job import Job, stored_job
from paceline.record import Row, rows_of
from paceline.settings.data import Files
from paceline.training.selection import Selection
from pictures_made import write_folder, write_tars, write_tfrecord

NAMES = tuple(f"class{number}" for number in range(10))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on ten classes, and beside its data a test set in class folders that lacks the first of those judged."""
    folder = tmp_path_factory.mktemp("test-set")
    write_folder(clean_pictures(80), folder / "data", 1 / 4)
    (folder / "page.yaml").write_text(PAGE)
    done = run_in(folder, "train", "page.yaml", "--data", "data", "--out", "run")
    assert done.returncode == 0, done.stderr
    for number, name in enumerate(sorted(child.name for child in (folder / "data/val").iterdir())):
        shutil.copytree(folder / "data/val" / name, folder / ("rest" if number else "first") / name)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judge(capsys: pytest.CaptureFixture[str], test: str | None) -> Row:
    asked = Selection(test=Path(test) if test else None)
    data = None if test else Path("data")
    assert validate.run(Path("run"), ["on.cpu_threads=1"], asked, data, as_json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert isinstance(row, dict)
    return row


def test_other_images_are_judged_by_the_classes_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The validation part in two: the sums over both are those of the whole, though each lacks classes."""
    whole, rest, first = (judge(capsys, test) for test in (None, "rest", "first"))
    assert whole["images"] == rest["images"] + first["images"]
    for key in ("loss", "top1", "top5"):
        together = (rest[key] * rest["images"] + first[key] * first["images"]) / whole["images"]
        assert together == pytest.approx(whole[key], rel=1e-6)
    rows = rows_of(folder / "run")
    assert [row["data"] for row in rows if row["kind"] == "test"] == [str(folder / "rest"), str(folder / "first")]
    assert {row["images"] for row in rows if row["kind"] == "validation"} == {whole["images"]}


@pytest.mark.long
def test_the_images_that_the_run_was_trained_on_need_not_be_there(
    folder: Path, capsys: pytest.CaptureFixture[str], paceline: Paceline
) -> None:
    before = judge(capsys, "rest")
    shutil.rmtree(folder / "data")
    done = paceline("validate", "run", "--test", "rest", "--json", "on.replicas=2", "on.micro_batch=4")
    assert done.returncode == 0, done.stderr
    (after,) = json.loads(done.stdout)
    assert after["images"] == before["images"]
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)


def test_all_means_every_checkpoint_that_these_images_have_not_seen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []
    for test in ("rest", "rest", "first"):
        asked = Selection(every=True, test=Path(test))
        assert validate.run(Path("run"), ["on.cpu_threads=1"], asked, None, as_json=True) == 0
        steps.append([row["step"] for row in json.loads(capsys.readouterr().out)])
    saved = checkpoint.saved_steps(folder / "run/checkpoints")
    assert len(saved) > 1
    assert steps == [saved, [], saved]


def to_test(*words: str, test: str = "rest") -> Job:
    return stored_job(Path("run"), list(words), None, Path(test))


def test_what_cannot_be_judged_is_told_in_one_line(folder: Path, paceline: Paceline) -> None:
    with pytest.raises(
        DataError,
        match=r"^--test nowhere: there is no such folder; write one with the images of each class in a folder$",
    ):
        to_test(test="nowhere")
    with pytest.raises(DataError, match=r"^--test page.yaml: this is a file; write the folder of the images$"):
        to_test(test="page.yaml")
    with pytest.raises(SpecError, match=r"^--data data and --test rest: .*; leave one out$"):
        stored_job(Path("run"), [], Path("data"), Path("rest"))
    shutil.move(folder / "first", folder / "rest/unicorn")
    with pytest.raises(DataError, match=r"class 'unicorn' is not one of .*; rename or remove it$"):
        to_test()
    shutil.rmtree(folder / "rest/unicorn")
    done = paceline("validate", "run", "--data", "rest", "data.max_bad=0")
    assert done.returncode == 2
    assert done.stderr.endswith("evaluate other images than the run's own with validate --test rest\n")
    (folder / "run/data.json").unlink()
    with pytest.raises(RunError, match=r"^--test rest: run was not trained on images in files"):
        to_test()


def test_only_what_is_judged_has_to_be_of_the_run_s_classes(folder: Path) -> None:
    """A folder with parts: its validation part is judged; one that has no other part will do."""
    shutil.move(folder / "rest", folder / "parts/val")
    count = to_test(test="parts").plan.facts.validation_images
    shutil.copytree(folder / "first", folder / "parts/train/unicorn")
    assert to_test(test="parts").plan.facts.validation_images == count


def test_a_test_set_has_labels_of_its_own(folder: Path) -> None:
    """Without class folders: labels in a file that is named, and not the file that the run was trained with."""
    flat = folder / "flat"
    flat.mkdir()
    paths = sorted((folder / "rest").rglob("*.*"))
    assert len(paths) > 5
    for path in paths:
        shutil.copy(path, flat / path.name)
    with pytest.raises(DataError, match=r"^flat: \d+ images have no label; write data.labels=FILE"):
        to_test(test="flat")
    (folder / "labels.csv").write_text("".join(f"{path.name},{path.parent.name}\n" for path in paths))
    found = to_test("data.labels=labels.csv", test="flat").plan
    assert isinstance(found.data, Files)
    assert found.facts.validation_images == len(paths)
    by_file = open_index(found.data, flat).validation.rows["label"].tolist()
    folders = to_test().plan.data
    assert isinstance(folders, Files)
    assert by_file == open_index(folders, folder / "rest").validation.rows["label"].tolist()
    stored = folder / "run/plan.yaml"
    assert "labels: null" in stored.read_text()
    shutil.rmtree(folder / "run/checkpoints")  # they know that this is not the recipe that was trained
    stored.write_text(stored.read_text().replace("labels: null", f"labels: {folder / 'labels.csv'}"))
    with pytest.raises(DataError, match=r"^flat: \d+ images have no label"):
        to_test(test="flat")
    for path in sorted(flat.iterdir())[2:]:
        path.unlink()
    with pytest.raises(DataError, match=r"^flat: no image here is of a class that the run knows$"):
        to_test(test="flat")


def test_an_image_that_cannot_be_decoded_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = sorted((folder / "rest").rglob("*.*"))[3]
    broken.write_bytes(b"nothing that could be decoded")
    asked = Selection(test=Path("rest"))
    assert validate.run(Path("run"), ["on.cpu_threads=1"], asked, None, as_json=False) == 0
    said = capsys.readouterr()
    count = len(list((folder / "rest").rglob("*.*")))
    assert f"a neighbor was evaluated in place of {broken.relative_to(folder / 'rest')}: " in said.err
    assert said.out.startswith(f"evaluated {count} images of {folder / 'rest'} on cpu")
    assert not quarantined(folder / "run")


def test_every_format_gives_the_same_images_to_judge(tmp_path: Path) -> None:
    """Classes by name, in another order than the run's; numbers stay numbers."""
    pictures = clean_pictures(60)
    write_every_format(pictures, tmp_path, 1 / 4)
    own = open_index(Files(name="images"), tmp_path / "folder").classes
    names = ("something else", *reversed(own))
    plain = open_index(Files(name="images"), tmp_path / "folder").validation.rows["label"].tolist()
    expected = None
    for form in ("folder", "pack"):
        found = evaluation_files(Files(name="images", images=45), names, tmp_path / form)
        index = open_index(found, tmp_path / form)
        assert (len(index.training), index.classes, found.validation_images) == (0, names, len(plain))
        labels = index.validation.rows["label"].tolist()
        expected = expected or labels
        assert labels == expected
    assert expected == [len(own) - label for label in plain]
    numbered = evaluation_files(Files(name="images", first_label=1), names, tmp_path / "tfrecord")
    there = open_index(Files(name="images"), tmp_path / "tfrecord").validation.rows["label"].tolist()
    assert open_index(numbered, tmp_path / "tfrecord").validation.rows["label"].tolist() == there


def test_numbers_of_classes_whose_names_the_tars_keep_go_by_name(tmp_path: Path) -> None:
    write_tars(clean_pictures(40), tmp_path, 1 / 4, wrong_labels=False)
    plain = open_index(Files(name="images"), tmp_path).validation.rows["label"].tolist()
    data = Files(name="images")
    assert open_index(evaluation_files(data, NAMES, tmp_path), tmp_path).validation.rows["label"].tolist() == plain
    (tmp_path / "metadata.json").write_text(json.dumps({"classes": NAMES[::-1]}))
    turned = open_index(evaluation_files(data, NAMES, tmp_path), tmp_path).validation.rows["label"].tolist()
    assert turned == [9 - label for label in plain]  # though nothing else has changed


def test_a_recipe_may_name_its_classes_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_folder(clean_pictures(40), tmp_path, 1 / 4)
    own = open_index(Files(name="images"), tmp_path)
    names, last = (*own.classes[::-1], "nothing yet"), len(own.classes) - 1
    other = open_index(Files(name="images", class_names=names), tmp_path)
    assert other.classes == names
    assert other.training.rows["label"].tolist() == [last - label for label in own.training.rows["label"].tolist()]
    with pytest.raises(DataError, match=r"rename or remove it, or correct data.class_names$"):
        open_index(Files(name="images", class_names=names[:2]), tmp_path)
    left = min(child.name for child in (tmp_path / "val").iterdir())
    for spare in set(own.classes) - {left}:
        for part in ("train", "val"):
            shutil.rmtree(tmp_path / part / spare, ignore_errors=True)
    with pytest.raises(DataError, match=f"all images are of one class, '{left}'"):
        locate(Files(name="images", class_names=names), tmp_path)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"class_names": ("a", "b", "a")}, "'a' is there twice; each class has one name of its own"),
        ({"class_names": ()}, r"there is none; leave it out, or write \[cat, dog\]"),
        ({"class_names": ("a", "b"), "classes": 3}, "has 2 names, and classes says 3; leave classes out"),
    ],
)
def test_names_that_contradict_are_refused(words: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Files.model_validate({"name": "images", **words})


def test_data_without_a_validation_part_are_judged_whole(tmp_path: Path) -> None:
    write_tfrecord(clean_pictures(20), tmp_path / "data", 0)
    found = evaluation_files(Files(name="images", validation=0.2, fraction=0.5), NAMES, tmp_path / "data")
    assert found.validation_images == 20
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images are here"):
        evaluation_files(Files(name="images"), NAMES, tmp_path / "empty")


@pytest.mark.long
def test_a_run_on_images_without_a_validation_part_is_judged_by_others(folder: Path, paceline: Paceline) -> None:
    train = ("train", "page.yaml", "--data", "data/train", "--out", "alone")
    refused = paceline(*train)
    assert "data.validation=0 evaluate.every=never to validate on none" in refused.stderr
    done = paceline(*train, "data.validation=0", "evaluate.every=never")
    assert done.returncode == 0, done.stderr
    assert "Next: paceline predict alone IMAGES" in done.stdout
    assert not [row for row in rows_of(folder / "alone") if row["kind"] == "validation"]
    assert "its data have no validation images; evaluate others with --test" in paceline("validate", "alone").stderr
    assert "name images to compare the export on with --images" in paceline("export", "alone", "--to=pt2").stderr
    (row,) = json.loads(paceline("validate", "alone", "--test", "data/val", "--json").stdout)
    assert row["images"] == sum(path.is_file() for path in (folder / "data/val").rglob("*"))
