"""Keys on their way through tars: a dot ends one there, and yet each image keeps its name and its place."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.data.index.scan import open_index
from paceline.data.pack.convert import to_folder, to_webdataset
from paceline.data.pack.writer import write_pack
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import make_pictures

DATA = Files(name="images")
PICTURES = [picture.bytes for picture in make_pictures(40, 2)[20:]]
KEYS = ("n01.a_1", "n01_1", "n01.1", "n01-1", "n01_1-2", "n01", "a.b.c", "a_b_c", "..x", "ünï.1", "n01.jpg")
"""In tars without dots several of these would have one name, and the rest another order."""


def write(folder: Path) -> Path:
    for number, key in enumerate(KEYS):
        for part in ("train/cat", "train/dog", "val/cat"):
            path = folder / part / f"{'x/' if key.startswith('.') else ''}{key}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PICTURES[number] + part.encode())
    return folder


def images_of(folder: Path, data: Files = DATA) -> list[list[tuple[str, int, bytes]]]:
    """Key, label and bytes of every image by its number, of both parts."""
    found = open_index(data, folder)
    parts = []
    for table in (found.training, found.validation):
        rows = zip(table.keys, table.rows.tolist(), strict=True)
        parts.append(
            [(key, row[3], (folder / table.shards[row[2]]).read_bytes()[row[0] : row[0] + row[1]]) for key, row in rows]
        )
    return parts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source")


@pytest.mark.parametrize("shuffle", [None, 3])
def test_tars_keep_keys_with_dots_and_the_order_of_images(source: Path, tmp_path: Path, shuffle: int | None) -> None:
    to_webdataset(open_index(DATA, source), tmp_path / "tars", samples=5, shuffle=shuffle)
    assert images_of(tmp_path / "tars") == images_of(source)
    assert {key for key, _, _ in images_of(source)[0]} == {key for key in KEYS if not key.startswith(".")}


def test_other_readers_find_one_image_and_one_label_under_every_name(source: Path, tmp_path: Path) -> None:
    to_webdataset(open_index(DATA, source), tmp_path / "tars", samples=999)
    with tarfile.open(tmp_path / "tars/train-000000.tar") as tar:
        names = [name.rpartition("/") for name in tar.getnames()]
    endings: dict[str, list[str]] = {}
    for folder, _, name in names:
        key, _, ending = name.partition(".")
        endings.setdefault(f"{folder}/{key}", []).append(ending)
    assert len(endings) == len(images_of(source)[0])
    assert all(found in (["jpg", "cls"], ["jpg", "cls", "json"]) for found in endings.values())
    assert endings["cat/n01"] == ["jpg", "cls"]  # what says nothing new is not written


def test_files_have_their_true_names_again(source: Path, tmp_path: Path) -> None:
    to_webdataset(open_index(DATA, source), tmp_path / "tars")
    to_folder(open_index(DATA, tmp_path / "tars"), tmp_path / "files")
    was, now = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg") if "x" not in path.parts}
        for folder in (source, tmp_path / "files")
    )
    assert now == was


def test_a_share_of_the_images_is_the_same_in_every_format(tmp_path: Path) -> None:
    for number, key in enumerate(KEYS[:8]):
        (tmp_path / "source/cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"source/cat/{key}.jpg").write_bytes(PICTURES[number])
    whole = open_index(DATA, tmp_path / "source", whole=True)
    to_webdataset(whole, tmp_path / "tars", samples=3)
    write_pack(open_index(DATA, tmp_path / "tars", whole=True), tmp_path / "pack", processes=1)
    part = Files(name="images", validation=0.4)
    expected = [[key for key, _, _ in images] for images in images_of(tmp_path / "source", part)]
    for kind in ("tars", "pack"):
        assert [[key for key, _, _ in images] for images in images_of(tmp_path / kind, part)] == expected


def test_images_of_one_key_and_class_keep_it(tmp_path: Path) -> None:
    for number, name in enumerate(("x/1.jpg", "y/1.jpg", "1-2.jpg")):
        for part in ("train", "val"):
            path = tmp_path / "source" / part / "cat" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PICTURES[number])
    to_webdataset(open_index(DATA, tmp_path / "source"), tmp_path / "tars")
    assert images_of(tmp_path / "tars") == images_of(tmp_path / "source")


@pytest.mark.parametrize("said", ["../../up", "a/b", "", "nul\0", "\ud800", 7, None, ["x"]])
def test_a_key_that_is_no_file_name_is_passed_over(tmp_path: Path, said: Any) -> None:
    for part in ("train", "val"):
        members = {"1.jpg": PICTURES[0], "1.json": json.dumps({"paceline_key": said, "label": 0}).encode()}
        with tarfile.open(tmp_path / f"{part}-000000.tar", "w") as tar:
            for name, content in members.items():
                header = tarfile.TarInfo(name)
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
    assert [key for key, _, _ in images_of(tmp_path)[0]] == ["1"]


def test_classes_without_training_images_are_not_lost_on_the_way_to_folders(source: Path, tmp_path: Path) -> None:
    whole = open_index(DATA, source)
    parts = whole.training, whole.validation
    training, validation = (replace(part, rows=part.rows.copy()) for part in parts)
    for part in (training, validation):
        part.rows["label"] *= 2
    gap = replace(whole, classes=("cat", "cow", "dog", "elk"), training=training, validation=validation)
    with pytest.raises(DataError, match=r"2 of 4 classes have no training images: cow, elk; .* --to webdataset"):
        to_folder(gap, tmp_path / "files")
    assert not (tmp_path / "files").exists()
    to_webdataset(gap, tmp_path / "tars")
    kept = open_index(DATA, tmp_path / "tars")
    assert kept.classes == gap.classes
    assert set(kept.training.rows["label"].tolist()) == {0, 2}
