"""Describing a data set: counts, sizes and encodings."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspect_data import DATA, PICTURES, table_of
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.data.inspect import describe
from pictures_made import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


def test_classes_are_counted_without_labels_that_are_none() -> None:
    table = table_of(*({"label": label} for label in (2, 0, 2, -1, 3, 99)))
    index = Index("folder", Path(), ("a", "b", "c"), table, table_of())
    assert describe.class_sizes(index, table).tolist() == [1, 0, 2]


def test_a_survey_says_what_there_is(folder: Path) -> None:
    found = describe.describe_data(open_index(DATA, folder))
    assert (found["format"], found["training images"], found["validation images"]) == ("folder", 55, 5)
    assert found["classes"] == 4
    assert found["bytes"] == sum(len(picture.bytes) for picture in PICTURES)
    others = ("cmyk", "png", "gif", "alpha", "palette")
    assert found["encodings"] == {
        "JPEG in tiles": 0,
        "sequential JPEG": 60 - len(others) - 2,
        "progressive JPEG": 1,
        "other": len(others),
        "no image header": 1,
    }
    assert found["turned by EXIF"] == 1
    assert found["width"]["smallest"] == 1
    assert found["height"]["smallest"] == 2
    assert 48 <= found["width"]["median"] <= found["width"]["largest"] == 117


def test_a_survey_tells_tiles_and_wrong_labels() -> None:
    tiled = {"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 9, "height": 5, "length": 3_000_000_000}
    table = table_of(tiled, tiled, {"flags": Flag.OTHER_LABEL, "width": 1, "height": 1, "objects": 2})
    found = describe.describe_data(Index("pack", Path("x"), ("a",), table, table_of({"flags": Flag.UNREADABLE})))
    assert found["encodings"]["JPEG in tiles"] == 2
    assert found["encodings"]["sequential JPEG"] == 0
    assert found["encodings"]["no image header"] == 1
    assert (found["labels outside the classes"], found["with objects"]) == (1, 1)
    assert found["bytes"] == 6_000_000_000  # more than a row's own type holds
    assert found["width"] == {"smallest": 1, "median": 9, "largest": 9}
