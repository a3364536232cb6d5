"""What a run and paceline validate --details say of each class and of the images that are answered wrongly."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from conftest import SMALL, Paceline, run_in
from image_files import PAGE, clean_pictures
from paceline.record import latest, rows_of
from pictures_made import write_folder

Table = list[dict[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images in class folders."""
    folder = tmp_path_factory.mktemp("details")
    write_folder(clean_pictures(80), folder / "data", 1 / 4)
    (folder / "page.yaml").write_text(PAGE)
    done = run_in(folder, "train", "page.yaml", "--data", "data", "--out", "run")
    assert done.returncode == 0, done.stderr
    return folder


def table(path: Path) -> Table:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tables(folder: Path) -> dict[str, Table]:
    return {path.name: table(path) for path in folder.iterdir()}


def test_a_run_keeps_the_counts_of_each_validation(made: Path) -> None:
    validations = latest(rows_of(made / "run"), "validation")
    folders = sorted((made / "run/validation").iterdir())
    assert [folder.name for folder in folders] == [f"step-{row['step']:09d}" for row in validations]
    for folder, row in zip(folders, validations, strict=True):
        found = tables(folder)
        assert found.keys() == {"classes.csv", "confusion.csv", "hardest.csv"}
        assert sum(int(one["images"]) for one in found["classes.csv"]) == row["images"]
        assert sum(int(one["right"]) for one in found["classes.csv"]) == round(row["top1"] * row["images"])
        assert len(found["hardest.csv"]) == min(64, row["images"])
        for one in found["confusion.csv"]:
            support = next(int(line["images"]) for line in found["classes.csv"] if line["class"] == one["truth"])
            assert sum(int(count) for name, count in one.items() if name != "truth") == support
        assert not [key for key, value in row.items() if isinstance(value, list | dict)]  # rows hold no matrix


def test_details_name_every_wrong_image_and_what_it_was_taken_for(made: Path) -> None:
    done = run_in(made, "validate", "run", "--details")
    assert done.returncode == 0, done.stderr
    row = latest(rows_of(made / "run"), "validation")[-1]
    folder = made / "run/validation" / f"step-{row['step']:09d}"
    wrong = table(folder / "wrong.csv")
    assert len(wrong) == row["images"] - round(row["top1"] * row["images"]) > 0
    for line in wrong:
        assert (made / "data" / line["path"]).is_file()
        assert Path(line["path"]).parent.name == line["truth"] != line["answer"]
        assert 0 < float(line["truth_probability"]) <= float(line["answer_probability"]) < 1
    losses = [float(line["loss"]) for line in wrong]
    assert losses == sorted(losses, reverse=True)
    confusion = {line["truth"]: line for line in table(folder / "confusion.csv")}
    assert sum(line["answer"] == wrong[0]["answer"] for line in wrong if line["truth"] == wrong[0]["truth"]) == int(
        confusion[wrong[0]["truth"]][wrong[0]["answer"]]
    )
    assert "the classes that are found least" in done.stdout
    assert "confused most" in done.stdout
    assert done.stdout.rstrip().endswith(f"run/validation/{folder.name}")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_details_of_other_images_go_to_a_folder_of_their_own(made: Path) -> None:
    done = run_in(made, "validate", "run", "--details", "--test", "data/val", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["details"]["folder"] == f"run/test/step-{row['step']:09d}"
    found = tables(made / row["details"]["folder"])
    assert sum(int(one["images"]) for one in found["classes.csv"]) == row["images"]


def test_in_place_of_a_damaged_image_the_neighbor_that_was_shown_is_named(made: Path) -> None:
    shutil.copytree(made / "data/val", made / "damaged")
    wrong = table(made / "run/test" / next((made / "run/test").iterdir()).name / "wrong.csv")
    spoilt = made / "damaged" / wrong[0]["path"]
    spoilt.write_bytes(spoilt.read_bytes()[:200])
    done = run_in(made, "validate", "run", "--details", "--test", "damaged", "--json", "data.max_bad=0.2")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    again = tables(made / row["details"]["folder"])
    assert wrong[0]["path"] not in {line["path"] for line in again["wrong.csv"]}
    assert sum(int(one["images"]) for one in again["classes.csv"]) == row["images"]


@pytest.mark.long
def test_details_are_the_same_from_two_replicas(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", "on.precision=fp64", "--out", "run").returncode == 0
    found = []
    for words in (["on.replicas=1"], ["on.replicas=2", "on.micro_batch=2"]):
        done = paceline("validate", "run", "--details", *words)
        assert done.returncode == 0, done.stderr
        texts = {path.name: path.read_text() for path in (tmp_path / "run/validation/step-000000006").iterdir()}
        paths = [line.split(",")[0] for line in texts["wrong.csv"].splitlines()]
        found.append((texts["classes.csv"], texts["confusion.csv"], paths))
    assert found[0] == found[1]
