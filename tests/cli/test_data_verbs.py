"""`paceline data check`, `paceline data show` and `paceline bench data` as a user types them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Paceline, make_plan
from paceline.augment.pipeline import Augmentation
from paceline.command import data_check, data_show
from paceline.data.inspect.samples import position_pairs
from paceline.data.load.files import FileLoader
from paceline.data.load.image_files import open_splits
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import Quarantine
from paceline.errors import DataError, SpecError
from paceline.settings.data import Files
from pictures_made import make_pictures, write_folder, write_tars

PAGE = """
model: resnet8
data: {name: images, side: 16, max_bad: 1}
global_batch: 8
norm_batch: 4
epochs: 20
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
augment: {flip: true, policy: {name: randaugment}, color: {brightness: 0.2}, erase: {probability: 0.5}}
report: 2 steps
"""
PICTURES = make_pictures(60, 4)
GOOD = [picture for picture in PICTURES if not picture.odd]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(PAGE)
    return str(path)


def facts_of(text: str) -> dict[str, str]:
    """Names and values of a table of two columns."""
    return dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)


def test_check_lists_each_bad_image_and_fails(paceline: Paceline, folder: Path) -> None:
    done = paceline("data", "check", str(folder), "max_bad=1%")
    assert done.returncode == 1, done.stderr
    bad = [line for line in done.stdout.splitlines() if line.startswith("train/class")]
    names = {f"train/class{p.label:03d}/{p.key}.JPEG" for p in PICTURES if p.odd in ("truncated", "corrupt", "empty")}
    assert {line.partition(": ")[0] for line in bad} == names
    assert any(line.endswith(": it is empty") for line in bad)
    facts = {name: value.strip() for name, value in facts_of(done.stdout).items()}
    assert (facts["images"], facts["bad images"], facts["- damaged"], facts["- empty"]) == ("60", "3", "2", "1")
    assert facts["bad images allowed"].startswith("1: a run would end")
    assert done.stderr == ""


def test_check_of_good_images_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_check.run(write_folder(GOOD, tmp_path), [], None, as_json=False) == 0
    facts = facts_of(capsys.readouterr().out)
    assert facts["bad images"].strip() == "0"
    assert "bad images allowed" not in facts
    assert facts["same key and label as another"].strip() == "0"


def test_check_as_json_says_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = [*GOOD, GOOD[0], GOOD[0]]
    source = write_tars([*twice, *(p for p in PICTURES if p.odd == "wrong")], tmp_path, validation=0)
    assert data_check.run(source, ["classes=6", "max_bad=50%"], 2, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    (bad,) = said["bad"]
    assert (bad["kind"], bad["reason"]) == ("label outside the classes", "its label 4004 is none of the 6 classes")
    assert bad["name"].startswith("train-00000")
    assert said["images"] == len(twice) + 1
    assert said["kinds"] == {"label outside the classes": 1}
    assert said["same_key_and_label"] == 2
    assert said["classes_without_training_images"] == ["4", "5"]
    assert said["allowed"] == (len(twice) + 2) // 2


def test_check_tells_people_of_classes_without_images_and_of_bad_ones_that_are_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tars(PICTURES, tmp_path)
    assert data_check.run(source, ["classes=30", "max_bad=10%"], 1, as_json=False) == 1
    facts = facts_of(capsys.readouterr().out)
    assert facts["- without training images"].strip().startswith("26: 4, 5, 6,")
    assert facts["- without training images"].strip().endswith("15, ...")
    assert facts["bad images allowed"].strip() == "6: a run replaces them"


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        data_check.run(Path("nowhere"), [], None, as_json=False)


def test_show_prints_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_show.run(folder, [], None, as_json=False)
    text = capsys.readouterr().out
    facts = {name: value.strip() for name, value in facts_of(text).items()}
    assert (facts["format"], facts["training images"], facts["progressive JPEG"]) == ("folder", "55", "1")
    assert facts["width"] == "1 to 117 pixels, median 80"
    assert "JPEG in tiles" not in facts
    assert "with objects" not in facts
    assert facts["class000"].split() == ["15", "0"]


def test_show_as_json_counts_every_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_show.run(folder, [], None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    classes = said["images of each class"]
    assert [row["class"] for row in classes] == ["class000", "class001", "class002", "class003"]
    assert sum(row["training images"] for row in classes) == said["training images"] == 55
    assert sum(row["validation images"] for row in classes) == said["validation images"] == 5


def test_of_many_classes_the_first_and_the_last_are_shown() -> None:
    rows: list[dict[str, Any]] = [{"class": str(n), "training images": n, "validation images": 0} for n in range(40)]
    shown = data_show._first_and_last(rows)
    assert [row["class"] for row in shown] == [*"01234", "... 30 more", *(str(n) for n in range(35, 40))]
    assert data_show._first_and_last(rows[:12]) == rows[:12]


def test_data_without_a_validation_part_is_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, sheet = write_folder(GOOD, tmp_path / "data", validation=0), tmp_path / "sheet.png"
    data_show.run(source, ["side=16"], sheet, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["training images"], said["validation images"]) == (45, 0)
    assert sheet.is_file()


def test_a_sheet_shows_what_the_network_would_see(tmp_path: Path, folder: Path, recipe: str) -> None:
    data_show.run(folder, [recipe, "augment.flip=true"], tmp_path / "sheet.png", as_json=True)
    with Image.open(tmp_path / "sheet.png") as image:
        grid = np.asarray(image)
    assert grid.shape == (2 * 60 + 12, 8 * 28 + 12, 3)
    tops = [26 + 60 * row + 18 * below for row in range(2) for below in range(2)]
    corners = [(top, 12 + 28 * column) for top in tops for column in range(8)]
    cells = [grid[top : top + 16, left : left + 16] for top, left in corners]
    captions = [grid[top - 14 : top, left : left + 16] for top, left in corners[:8]]
    assert all((caption < 128).any() for caption in captions)  # the name of the class
    assert (grid[:12] == 255).all()
    assert (grid[60:72] == 255).all()  # white between pairs
    counts = ("data.images=55", "data.validation_images=5", "data.classes=4")
    plan = make_plan(*counts, text=PAGE)
    order = training_order(plan)
    images, later = order.images(np.arange(8)), order.images(np.arange(55, 110)).tolist()
    positions = [*range(8), *(55 + later.index(image) for image in images.tolist())]
    for cell, position in zip(cells, positions, strict=False):
        assert np.array_equal(cell, as_trained(plan, folder, position)), position


def test_a_sheet_shows_images_before_they_are_mixed(tmp_path: Path, folder: Path, recipe: str) -> None:
    sheets = {}
    for word in ("mix.mixup=0", "mix={mixup: 0.2, cutmix: {name: fixed, kept: 0.5}, block: 4}"):
        data_show.run(folder, [recipe, word], tmp_path / "sheet.png", as_json=True)
        sheets[word] = (tmp_path / "sheet.png").read_bytes()
    assert len(set(sheets.values())) == 1


def as_trained(plan: Any, folder: Path, position: int) -> Any:
    """A picture of the run itself: one replica, whole micro-batches, normalized, and then as colors again."""
    assert isinstance(plan.data, Files)
    loader = FileLoader(
        plan, partial(open_splits, plan, plan.data, folder), 0, torch.device("cpu"), Quarantine(None, 99)
    )
    with closing(loader), closing(loader.training(position // 8)) as shares:
        (batch,) = next(shares)
    assert batch.draws is not None
    augment = Augmentation(plan, torch.device("cpu"))
    changed = augment(augment.prepare(batch.images, batch.draws), batch.labels, batch.draws)[0][position % 8]
    mean, spread = (
        torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (plan.data.mean, plan.data.std)
    )
    colors = ((changed * spread + mean) * 255).round().clamp(0, 255)
    return colors.to(torch.uint8).permute(1, 2, 0).numpy()


def test_an_image_that_an_epoch_drops_is_shown_in_a_later_one() -> None:
    counts = ("data.images=55", "data.validation_images=5", "data.classes=4", "drop_last=true", "global_batch=32")
    plan = make_plan(*counts, text=PAGE)
    pairs, order = [pair[1:] for pair in position_pairs(plan, 16)], training_order(plan)
    firsts, seconds = (np.array(column) for column in zip(*pairs, strict=True))
    assert firsts.tolist() == [*range(16)]
    assert order.images(firsts).tolist() == order.images(seconds).tolist()
    assert (seconds >= 32).all()
    assert (seconds >= 64).any()


def test_what_cannot_be_shown_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SpecError, match=r"write --sheet .*a\.png"):
        data_show.run(folder, [], tmp_path / "a.jpg", as_json=False)
    with pytest.raises(SpecError, match="trains on cifar10, which is not in files"):
        data_show.run(folder, ["cifar10/resnet20"], None, as_json=False)
    with pytest.raises(DataError, match="cannot be written"):
        data_show.run(folder, ["side=8"], tmp_path / "none" / "a.png", as_json=False)


def test_bench_measures_and_names_the_limit(paceline: Paceline, folder: Path, recipe: str) -> None:
    words = [recipe, "--data", str(folder), "--device", "cpu", "--seconds", "0.01", "--images", "24"]
    done = paceline("bench", "data", *words, "on.loader_workers=2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["images"], said["threads"], said["warm_cache"], said["transfer"]) == (24, 2, True, None)
    measured = [(row["images"], row["threads"]) for row in said["rates"]]
    assert {("as it is", 1), ("as it is", 2), ("a smaller pack", 2)} <= set(measured)
    assert all(min(row["read"], row["decode"], row["whole"]) > 0 for row in said["rates"])
    assert said["sentence"].startswith(f"{said['limit']} limits: ")
    assert done.stderr == ""


def test_bench_refuses_data_that_is_not_in_files(paceline: Paceline) -> None:
    done = paceline("bench", "data")
    assert done.returncode == 2
    assert done.stderr == "error: shapes/resnet8 trains on shapes, which is not in files; write data=images after it\n"


def test_names_that_are_not_utf_8_are_printed_with_escapes(paceline: Paceline, tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in (b"cat", b"d\xf6g"):
            place = tmp_path / "data" / part / os.fsdecode(name)
            place.mkdir(parents=True)
            (place / os.fsdecode(b"\xff.jpg")).write_bytes(GOOD[0].bytes if name == b"cat" else b"no image")
    for words, status in ((("check",), 1), (("show",), 0)):
        done = paceline("data", *words, str(tmp_path / "data"), env={"PYTHONIOENCODING": "utf-8:strict"})
        assert done.returncode == status, done.stderr
        assert "d\\udcf6g" in done.stdout


def test_notes_on_what_is_skipped_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(GOOD, tmp_path)
    (tmp_path / "train" / "class000" / "x.cr2").write_bytes(b"of a camera")
    (tmp_path / "train" / "empty").mkdir()
    for _ in range(2):
        data_check.run(tmp_path, [], 1, as_json=False)
        data_show.run(tmp_path, [], None, as_json=False)
        said = capsys.readouterr().out
        assert said.count("1 file was skipped: 1 .cr2") == 2
        assert "note 1" not in said
        assert said.count("1 folder has no images: train/empty") == 2
