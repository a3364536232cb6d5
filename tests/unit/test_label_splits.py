"""Files of labels over images: splits in a column, other roots, corrections, and what is said of what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from folders_made import labels, put
from paceline.data.index.scan import open_index
from paceline.data.index.table import Index
from paceline.errors import DataError
from paceline.settings.data import Files


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return put(tmp_path / "photos", *(f"images/{number}.jpg" for number in range(1, 7)))


def opened(folder: Path, text: str, name: str = "labels.csv", **settings: Any) -> Index:
    (folder / name).write_text(text)
    return open_index(Files.model_validate({"name": "images", "labels": name, **settings}), folder)


def table(split: str) -> str:
    rows = ["1,cat,train", "2,dog,train", f"3,cat,{split}", f"4,dog,{split}", "5,cat,test", "6,dog,test"]
    return "image,class,split\n" + "\n".join(rows)


def test_a_split_column_parts_the_images(photos: Path) -> None:
    index = opened(photos, table("Validation"))
    assert labels(index.training, index) == {"1": "cat", "2": "dog"}
    assert labels(index.validation, index) == {"3": "cat", "4": "dog"}
    assert index.notes == ("2 images of the test split are left out",)


def test_a_test_split_is_validated_on_where_there_is_no_other(photos: Path) -> None:
    index = opened(photos, table("TEST"))
    assert list(index.validation.keys) == ["3", "4", "5", "6"]
    assert index.notes == ()


def test_a_column_of_other_words_parts_nothing(photos: Path) -> None:
    index = opened(photos, table("blue"), validation=0.5)
    assert len(index.training) + len(index.validation) == 6


def test_labels_without_files_and_files_without_labels_are_noted(photos: Path) -> None:
    index = opened(photos, "1.jpg,cat\n2.jpg,dog\n3.jpg,cat\n4.jpg,dog\nghost.jpg,cat\n", validation=0.5)
    assert index.notes == ("1 label has no image: ghost.jpg", "2 images not in labels.csv are skipped")


@pytest.mark.parametrize(
    "root", ["/home/bob/photos/images", "C:\\photos\\images", "../images", "photos/images", "jpgs"]
)
def test_paths_that_begin_elsewhere_are_found_by_their_ends(photos: Path, root: str) -> None:
    mark = "\\" if "\\" in root else "/"
    rows = [f"{root}{mark}{number}.jpg,{'cat' if number % 2 else 'dog'}" for number in range(1, 7)]
    index = opened(photos, "\n".join(rows), validation=0.5)
    found = labels(index.training, index) | labels(index.validation, index)
    assert found == {str(number): "cat" if number % 2 else "dog" for number in range(1, 7)}


def test_images_of_several_roots_keep_their_folders(photos: Path) -> None:
    put(photos, "more/1.jpg", "more/2.jpg")
    rows = [f"/disk/a/images/{number}.jpg,cat" for number in (1, 2)] + [
        f"/b/more/{number}.jpg,dog" for number in (1, 2)
    ]
    index = opened(photos, "\n".join(rows), validation=0.5)
    both = [*index.training.shards, *index.validation.shards]
    assert sorted(both) == ["images/1.jpg", "images/2.jpg", "more/1.jpg", "more/2.jpg"]


def test_a_file_of_labels_for_other_images_says_so(photos: Path) -> None:
    message = r"labels.csv: it lists 1 file, such as 'x.jpg', and none is here; the images are such as 'images/1.jpg'"
    with pytest.raises(DataError, match=message):
        opened(photos, "x.jpg,cat\n", validation=0.5)


@pytest.mark.parametrize("classes", [("cat", "dog"), ("0", "1")])
def test_a_test_folder_without_labels_is_left_out_where_labels_come_in_a_file(
    photos: Path, classes: tuple[str, str]
) -> None:
    put(photos, *(f"train/{name}.jpg" for name in "abcd"), "test/x.jpg", "test/y.jpg")
    rows = [f"{name},{classes[number % 2]}" for number, name in enumerate("abcd")]
    index = opened(photos, "id,label\n" + "\n".join(rows), validation=0.5)
    assert sorted([*index.training.keys, *index.validation.keys]) == ["a", "b", "c", "d"]
    assert index.notes == ("2 images not in labels.csv are skipped",)


def corrected(folder: Path, text: str, **settings: Any) -> Index:
    (folder / "fix.csv").write_text(text)
    return open_index(Files.model_validate({"name": "images", "relabel": "fix.csv", **settings}), folder)


def test_corrections_lie_over_class_folders_and_labels(photos: Path) -> None:
    folders = put(photos.parent / "folders", "train/cat/1.jpg", "train/dog/2.jpg", "train/dog/3.jpg", "val/cat/4.jpg")
    index = corrected(folders, "file,class\n3.jpg,cat\ntrain/dog/2.jpg,dog\n4,dog\nnone.jpg,cat\n")
    assert labels(index.training, index) == {"1": "cat", "2": "dog", "3": "cat"}
    assert labels(index.validation, index) == {"4": "dog"}
    assert index.notes == (
        "data.relabel changes 2 labels, leaves out 0 images",
        "1 line of data.relabel found no image: none.jpg",
    )
    (photos / "labels.csv").write_text("\n".join(f"{number}.jpg,{number % 2}" for number in range(1, 7)))
    index = corrected(photos, "1.jpg,0\n2.jpg,\n", labels="labels.csv", validation=0.5)
    found = labels(index.training, index) | labels(index.validation, index)
    assert found == {"1": "0", "3": "1", "4": "0", "5": "1", "6": "0"}


def test_an_empty_class_leaves_an_image_out(photos: Path) -> None:
    folders = put(photos.parent / "folders", "train/cat/1.jpg", "train/dog/2.jpg", "train/dog/3.jpg", "val/cat/4.jpg")
    index = corrected(folders, "3.jpg,\n")
    assert labels(index.training, index) == {"1": "cat", "2": "dog"}
    assert index.notes == ("data.relabel changes 0 labels, leaves out 1 image",)


def test_corrections_that_change_make_another_index(photos: Path) -> None:
    folders = put(photos.parent / "folders", "train/cat/1.jpg", "train/dog/2.jpg", "train/dog/3.jpg", "val/cat/4.jpg")
    first, second = corrected(folders, "3.jpg,cat\n"), corrected(folders, "3.jpg,dog\n")
    assert labels(first.training, first)["3"] == "cat"
    assert labels(second.training, second)["3"] == "dog"
