"""What is found in a folder that a person names: which data set is meant, what is left out, and what is said of it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.data.index import locate
from paceline.data.index.formats import IMAGE_ENDINGS
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag
from paceline.errors import DataError
from paceline.settings.data import Cifar, Files
from pictures_made import make_pictures, write_folder, write_tars

FORMS = {".jfif": "JPEG", ".jpe": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".ppm": "PPM", ".pgm": "PPM",
         ".jp2": "JPEG2000", ".avif": "AVIF"}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def picture(form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 10, 90)).save(buffer, form)
    return buffer.getvalue()


def put(folder: Path, *names: str, content: bytes = picture()) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def files(**settings: Any) -> Files:
    return Files.model_validate({"name": "images", **settings})


def cifar(folder: Path) -> Path:
    """CIFAR-10 as far as its sizes go, which take no room."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        with (folder / name).open("wb") as file:
            file.truncate(30_730_000)
    return folder


PARTS = tuple(f"{part}/{name}/{part}{name}.jpg" for part in ("train", "val") for name in ("cat", "dog"))


def test_images_in_the_folder_come_before_cifar_above_or_below_it(tmp_path: Path) -> None:
    cifar(tmp_path)
    folder = put(tmp_path / "mine", *PARTS)
    data, found = locate.locate(None, folder)
    assert isinstance(data, Files)
    assert (data.images, found) == (2, folder)
    cifar(folder / "other")
    assert isinstance(locate.locate(None, folder)[0], Files)
    cifar(folder)
    assert isinstance(locate.locate(None, folder)[0], Cifar)


def test_cifar_below_comes_before_cifar_above(tmp_path: Path) -> None:
    cifar(tmp_path)
    below = cifar(tmp_path / "mine" / "cifar-10-batches-bin")
    assert locate.locate(None, tmp_path / "mine") == (Cifar(name="cifar10"), below)


@pytest.mark.parametrize("locked", ["private", "lost+found"])
def test_a_folder_that_may_not_be_looked_into_is_passed_over(
    tmp_path: Path, locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cifar(tmp_path / "disk" / "zoo").parent
    (folder / locked).mkdir()
    refuse(monkeypatch, os, "stat", lambda path: f"{locked}/" in str(path))
    if locked == "lost+found":
        refuse(monkeypatch, os, "scandir", lambda path: str(path).endswith(locked))
    assert locate.locate(None, folder) == (Cifar(name="cifar10"), folder / "zoo")


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, locked: Callable[[Any], bool]) -> None:
    """Let a call fail as it does for other users than the one who may do everything."""
    original = getattr(owner, name)

    def call(path: Any = ".", *rest: Any, **options: Any) -> Any:
        if locked(path):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *rest, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("ending", FORMS)
def test_every_ending_that_pillow_reads_is_an_image(tmp_path: Path, ending: str) -> None:
    put(tmp_path, *PARTS)
    put(tmp_path, f"train/cat/x{ending.upper()}", content=picture(FORMS[ending]))
    table = open_index(files(), tmp_path).training
    (number,) = (number for number, key in enumerate(table.keys) if key == "x")
    assert not int(table.rows["flags"][number]) & Flag.UNREADABLE
    assert int(table.rows["width"][number]) == 24
    assert ending in IMAGE_ENDINGS


def test_what_is_skipped_is_noted_however_the_index_is_opened(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", *PARTS, "train/cat/a.CR2", "train/dog/deep/b.cr2", "val/dog/c.cr2", "train/n.csv")
    put(folder, "train/dog/notes.txt", "train/dog/.hidden", "labels.csv")
    (folder / "train" / "empty" / "below").mkdir(parents=True)
    notes = ("4 files were skipped: 3 .cr2, 1 .txt", "1 folder has no images: train/empty")
    for _ in range(2):
        assert open_index(files(), folder).notes == notes
    put(folder, "train/dog/README")
    again = ("5 files were skipped: 3 .cr2, 1 without ending, 1 .txt", notes[1])
    assert open_index(files(), folder).notes == again
    assert open_index(files(fraction=0.9), folder).notes == again


def test_a_compressed_archive_beside_class_folders_is_skipped_and_noted(tmp_path: Path) -> None:
    put(tmp_path / "data", "cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "photos.tgz", "more.tar.gz", "README")
    found = open_index(files(validation=0.5), tmp_path / "data")
    assert found.classes == ("cat", "dog")
    assert found.notes == ("2 files were skipped: 1 .gz, 1 .tgz",)


def test_an_unlabeled_test_part_is_left_out_by_naming_the_training_part(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg")
    with pytest.raises(DataError, match=rf"or leave them out: --data {tmp_path}/train data\.validation=10%"):
        open_index(files(), tmp_path)


def test_a_folder_above_several_data_sets_says_what_is_meant(tmp_path: Path) -> None:
    put(tmp_path / "high" / "dataset", *PARTS)
    put(tmp_path / "high" / "other", *PARTS)
    with pytest.raises(DataError, match=r"; did you mean one of the folders in it: dataset, other\?$"):
        locate.locate(None, tmp_path / "high")


def test_class_folders_with_parts_of_their_own_are_data_sets(tmp_path: Path) -> None:
    put(tmp_path, "a/train/1.jpg", "a/val/2.jpg", "b/Train/cat/3.jpg", "b/test/cat/4.jpg", "c/5.jpg")
    with pytest.raises(DataError, match=rf"images of its own: a, b; write .* such as --data {tmp_path}/a$"):
        open_index(files(validation=0.5), tmp_path)


def test_images_none_of_which_can_be_read_are_nothing_to_train_on(tmp_path: Path) -> None:
    folder = put(tmp_path / "photos", *PARTS, content=b"nothing")
    with pytest.raises(DataError, match="none of the training images can be read; `paceline data check"):
        locate.locate(files(), folder)


@pytest.mark.parametrize("key", ["labels", "relabel"])
def test_a_file_of_labels_that_is_missing_is_not_taken_for_none(tmp_path: Path, key: str) -> None:
    folder = put(tmp_path / "photos", *PARTS)
    open_index(files(), folder)  # which is kept, and must not stand for another one
    with pytest.raises(DataError, match=rf"gone.csv: the file of labels \(data.{key}\) cannot be read"):
        open_index(files(**{key: "gone.csv"}), folder)


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.jpg", "val/cat/2.jpg")
    with pytest.raises(DataError, match="all images are of one class, 'cat', so nothing can be learned; add another"):
        locate.locate(None, tmp_path)
    put(tmp_path / "high", "pets/cat/1.jpg", "pets/dog/2.jpg", "pets/dog/3.jpg")
    with pytest.raises(DataError, match=rf"one class, 'pets', .*; did you mean --data {tmp_path}/high/pets\?"):
        locate.locate(files(validation=0.5), tmp_path / "high")


@pytest.mark.parametrize("other", [None, "cifar-10-batches-bin", "photos"])
def test_datasets_dir_may_be_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None) -> None:
    sets = tmp_path / "sets"
    web = write_tars(make_pictures(40, 2), sets / "imagenet-webdata-format", validation=0.5)
    if other == "photos":
        write_folder(make_pictures(40, 2), sets / other, validation=0.5)
    elif other is not None:
        (sets / other).mkdir()
        (sets / other / "data_batch_1.bin").touch()
    monkeypatch.delenv("DATA_DIR", raising=False)
    for given in (sets, web):
        monkeypatch.setenv("DATASETS_DIR", str(given))
        assert locate.locate(Files(name="imagenet"), locate.given_folder(None))[1] == web
        assert locate.dataset_folder(tmp_path) == tmp_path
    monkeypatch.setenv("DATASETS_DIR", str(sets))
    assert locate.dataset_folder(sets) == (sets if other else web), "several are not chosen between"
    monkeypatch.setenv("DATA_DIR", str(sets))
    assert locate.dataset_folder(sets, "imagenet") == sets
