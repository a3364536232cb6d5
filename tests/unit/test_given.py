"""Images that a person names: what each word stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.index.given import GivenImages, find_images
from paceline.data.index.table import Flag
from paceline.errors import DataError


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few images in folders; the test runs above them."""
    for name in ("a.jpg", "b.PNG", "deep/c.jpg", ".hidden.jpg", "notes.txt"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(path, "PNG" if name.endswith("PNG") else "JPEG")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def find(*words: str, lines: str = "") -> GivenImages:
    return find_images(words, iter(lines.splitlines(keepends=True)))


@pytest.mark.usefixtures("photos")
def test_folders_patterns_files_and_pipes_name_images_once_each_in_order() -> None:
    assert find("photos").paths == ["photos/a.jpg", "photos/b.PNG", "photos/deep/c.jpg"]
    assert find("photos/**/*.jpg").paths == ["photos/a.jpg", "photos/deep/c.jpg"]
    assert find("photos/b.PNG", "photos/*").paths[:2] == ["photos/b.PNG", "photos/a.jpg"]
    assert find("-", lines="photos/b.PNG\r\n\nphotos/a.jpg\n").paths == ["photos/b.PNG", "photos/a.jpg"]


@pytest.mark.parametrize(
    "text",
    ["file,class\na.jpg,cat\ndeep/c.jpg,dog\n", "class;path\ncat;a.jpg\ndog;deep/c.jpg\n", "a.jpg\ndeep/c.jpg\n"],
)
def test_a_table_names_images_beside_it(photos: Path, text: str) -> None:
    (photos / "list.csv").write_text(text)
    assert find("photos/list.csv").paths == ["photos/a.jpg", "photos/deep/c.jpg"]


def test_the_size_is_read_and_what_cannot_be_read_is_told(photos: Path) -> None:
    (photos / "bad.jpg").write_bytes(b"nothing")
    images = find("-", lines="photos/a.jpg\nphotos/bad.jpg\ngone.jpg\n")
    assert images.table.rows[["width", "height"]].tolist() == [(6, 4), (0, 0)]
    assert images.table.rows["flags"][1] == Flag.UNREADABLE
    assert images.unreadable == {"gone.jpg": "No such file or directory"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gone.jpg", "gone.jpg: there is no such file or folder; name images, folders"),
        ("-", "-: standard input names no image; write one path to a line"),
        ("*.gif", r"\*.gif: no file matches"),
        ("empty", "empty: there are no images here"),
        ("empty.csv", "empty.csv: names no image"),
        ("gone.csv", "gone.csv: cannot be read: No such file"),
    ],
)
@pytest.mark.usefixtures("photos")
def test_a_word_that_stands_for_no_image_is_refused(word: str, message: str) -> None:
    Path("empty").mkdir()
    Path("empty.csv").write_text("file\n")
    with pytest.raises(DataError, match=message):
        find(word)
