"""The layouts that people have: which folders are splits and which are classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folders_made import labels, picture, put
from paceline.data.index import image_header
from paceline.data.index.formats.layout import split_named
from paceline.data.index.locate import recognize
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.errors import DataError
from paceline.settings.data import Files


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def opened(folder: Path, **settings: Any) -> Index:
    return open_index(Files.model_validate({"name": "images", **settings}), folder)


def split(training: str, validation: str) -> list[str]:
    return [f"{training}/{name}/{name}1.jpg" for name in ("cat", "dog")] + [
        f"{validation}/{name}/{name}2.jpg" for name in ("cat", "dog")
    ]


@pytest.mark.parametrize(
    ("training", "validation"),
    [
        ("training_set", "test_set"),
        ("training_set/training_set", "test_set/test_set"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("Train", "Valid"),
        ("TRAIN", "Testing"),
        ("train_images", "val_images"),
        ("trainset", "testset"),
        ("train2017", "val2017"),
        ("dataset/train", "dataset/val"),
        ("archive/dataset/train", "archive/dataset/test"),
        ("training", "dev"),
        ("cats-and-dogs-train", "cats-and-dogs-val"),
    ],
)
def test_splits_have_any_usual_name(tmp_path: Path, training: str, validation: str) -> None:
    index = opened(put(tmp_path / "data", *split(training, validation), "__MACOSX/._x.jpg"))
    assert index.classes == ("cat", "dog")
    assert labels(index.training, index) == {"cat1": "cat", "dog1": "dog"}
    assert labels(index.validation, index) == {"cat2": "cat", "dog2": "dog"}


@pytest.mark.parametrize("name", ["setting", "test bench", "trains", "my train", "contest", "data", "evaluate me"])
def test_a_name_that_says_more_than_the_split_is_no_split(name: str) -> None:
    assert split_named(name) is None


def test_classes_that_sound_like_splits_stay_classes(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", "train set/1.jpg", "train set/2.jpg", "car/3.jpg", "car/4.jpg", "test drive/5.jpg")
    assert opened(folder, validation=0.5).classes == ("car", "test drive", "train set")


def test_a_validation_folder_of_the_exact_name_comes_before_others(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", *split("train", "test"), "val_images/cat/x.jpg", "val_images/dog/y.jpg")
    assert set(opened(folder).validation.keys) == {"cat2", "dog2"}


def test_unknown_folders_that_hold_the_same_folders_are_refused_as_classes(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", *split("mine", "yours"))
    with pytest.raises(
        DataError, match=r"mine and yours hold folders of the same names, cat, dog: splits, not classes;"
    ):
        opened(folder, validation=0.5)
    assert opened(folder, validation=0.5, class_names=("mine", "yours")).classes == ("mine", "yours")
    put(folder, "mine/3.jpg")
    assert opened(folder, validation=0.5).classes == ("mine", "yours")


def tiny_imagenet(folder: Path) -> Path:
    for number, name in enumerate(("n01", "n02")):
        put(folder, f"train/{name}/images/{name}_0.JPEG", f"train/{name}/{name}_boxes.txt")
        put(folder, f"val/images/val_{number}.JPEG")
    put(folder, "test/images/test_0.JPEG", "wnids.txt")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    return folder


def test_tiny_imagenet_is_read_as_it_is(tmp_path: Path) -> None:
    folder = tiny_imagenet(tmp_path / "tiny-imagenet-200")
    index = opened(folder)
    assert labels(index.training, index) == {"n01_0": "n01", "n02_0": "n02"}
    assert labels(index.validation, index) == {"val_0": "n02", "val_1": "n01"}
    assert index.notes == ()  # files of boxes belong to it
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\nval_1.JPEG\tn01\n")
    again = opened(folder)
    assert labels(again.validation, again) == {"val_0": "n01", "val_1": "n01"}
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG n01\n")
    with pytest.raises(DataError, match=r"val_annotations.txt:1: expected a file, a tab and its class"):
        opened(folder)


def test_a_broken_link_is_counted(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", *split("train", "val"))
    (folder / "train" / "cat" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert opened(folder).notes == ("1 file was skipped: 1 broken link",)


def test_a_class_that_differs_in_case_is_named(tmp_path: Path) -> None:
    folder = put(tmp_path / "data", *split("train", "val"), "val/Cat/3.jpg")
    with pytest.raises(DataError, match="class 'Cat' has no training images; did you mean 'cat'"):
        opened(folder)


def heic(color: tuple[int, int, int]) -> bytes:
    import pillow_heif

    pillow_heif.register_heif_opener()
    return picture("HEIF", color)


def test_heic_is_read_with_pillow_heif_and_named_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.data.load.decode import decode_into

    folder = put(tmp_path / "data", *split("train", "val"))
    put(folder, "train/cat/phone.HEIC", "train/bird/bird1.heic", content=heic((10, 200, 90)))
    index = opened(folder)
    assert index.classes == ("bird", "cat", "dog")
    number = list(index.training.keys).index("phone")
    row = index.training.rows[number]
    assert (int(row["width"]), int(row["height"])) == (24, 16)
    pixels = np.empty((8, 8, 3), np.uint8)
    encoded = (folder / index.training.span(number)[0]).read_bytes()
    decode_into(encoded, int(row["flags"]), 24, 16, (0, 0, 16, 24), False, "bilinear", pixels)
    assert np.abs(pixels.astype(int) - (10, 200, 90)).max() < 12

    monkeypatch.setattr(image_header, "heif_installed", lambda: False)
    monkeypatch.setattr("paceline.data.index.formats.layout.heif_installed", lambda: False)
    monkeypatch.setattr("paceline.data.index.scan.heif_installed", lambda: False)
    without = opened(folder)
    assert without.classes == ("cat", "dog")
    assert without.notes == (
        "2 files were skipped: 2 .heic; write pip install pillow-heif to read .heic",
        "1 folder has no images: train/bird",
    )
    shutil.rmtree(folder)
    put(folder, "cat/1.heic", "dog/2.heic", content=encoded)
    with pytest.raises(DataError, match=r"are \.heic files, which pillow-heif reads; write pip install pillow-heif$"):
        opened(folder)
    assert image_header.parse_header(encoded).flags & Flag.UNREADABLE


def test_a_folder_of_a_camera_s_raw_files_is_told_what_it_holds(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.CR2", "dog/2.cr2", content=b"II*")
    for verb in (opened, recognize):
        with pytest.raises(DataError, match=r"a camera's raw files, such as \.cr2 or \.nef; save them as JPEG or PNG"):
            verb(tmp_path)
