"""The order of images: the same files are the same index as ever, so that the same recipe stays the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from folders_made import put
from paceline.data.index.scan import open_index
from paceline.data.index.table import Table
from paceline.settings.data import Files


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def written(folder: Path, **settings: Any) -> tuple[str, str]:
    """The training and validation images in order, each as its path and its class number."""
    index = open_index(Files.model_validate({"name": "images", **settings}), folder)
    return in_order(index.training), in_order(index.validation)


def in_order(table: Table) -> str:
    labels = table.rows["label"].tolist()
    return " ".join(f"{table.span(image)[0]}:{label}" for image, label in enumerate(labels))


def test_class_folders_are_in_the_order_they_always_had(tmp_path: Path) -> None:
    names = [f"{name}/{number}.jpg" for number in range(4) for name in ("b", "a")]
    assert written(put(tmp_path / "data", *names), validation=0.25) == (
        "a/0.jpg:0 a/1.jpg:0 b/1.jpg:1 a/2.jpg:0 b/2.jpg:1 b/3.jpg:1",
        "b/0.jpg:1 a/3.jpg:0",
    )


def test_splits_are_in_the_order_they_always_had(tmp_path: Path) -> None:
    names = ["train/b/2.jpg", "train/a/deep/1.jpg", "train/a/10.jpg", "val/b/1.jpg", "val/a/2.jpg", "test/a/9.jpg"]
    assert written(put(tmp_path / "data", *names)) == (
        "train/a/deep/1.jpg:0 train/a/10.jpg:0 train/b/2.jpg:1",
        "val/b/1.jpg:1 val/a/2.jpg:0",
    )


@pytest.mark.parametrize(
    "text",
    [
        "1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,a\n",
        "file,class,note\n1.jpg,1,x\n2.jpg,0,y\n3.jpg,1,z\n4.jpg,0,\n5.jpg,0,x\n",
    ],
)
def test_labeled_images_are_in_the_order_they_always_had(tmp_path: Path, text: str) -> None:
    folder = put(tmp_path / "data", *(f"{number}.jpg" for number in range(1, 6)))
    (folder / "labels.csv").write_text(text)
    expected = "1.jpg:1 2.jpg:0 4.jpg:0", "3.jpg:1 5.jpg:0"
    assert written(folder, labels="labels.csv", validation=0.4) == expected
