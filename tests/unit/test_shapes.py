"""The built-in data set: the same bits everywhere, kept in a cache that is checked, and not too easy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import make_plan
from paceline.data.index import file
from paceline.data.load import arrays, shapes
from paceline.data.load.arrays import Source, open_source

GOLDEN = {
    "train": "31e49760a3c6937845e2848160ff020dc41aee9ec1c25e3b2867576970aa8437",
    "validation": "0f34e59df8361610254100e8d6c0a1b9da1b9f3efe583b50ac1e55dcd956592e",
}


@pytest.mark.parametrize("split", shapes.SPLITS)
def test_the_first_hundred_images_are_the_same_bits_everywhere(split: str) -> None:
    images, labels = shapes.draw_shapes(split, 100)
    assert images.shape == (100, 32, 32, 3)
    assert images.dtype == np.uint8
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == GOLDEN[split]


def test_an_image_does_not_depend_on_how_many_are_drawn() -> None:
    few, few_labels = shapes.draw_shapes("train", 7)
    many, many_labels = shapes.draw_shapes("train", 150)
    assert np.array_equal(few, many[:7])
    assert np.array_equal(few_labels, many_labels[:7])


def test_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match="shapes has no split 'test'; it has train and validation"):
        shapes.draw_shapes("test", 1)


def test_there_are_ten_kinds_of_shape() -> None:
    assert len(shapes.CLASSES) == len(set(shapes.CLASSES)) == 10


@pytest.mark.long
def test_a_linear_classifier_cannot_tell_the_shapes_apart() -> None:
    """Ridge regression on the pixels, at the best of several strengths: a network has something to learn."""
    (images, labels), (others, answers) = shapes.draw_shapes("train", 2500), shapes.draw_shapes("validation", 500)
    assert np.bincount(labels).min() > 200
    assert not {p.tobytes() for p in images} & {p.tobytes() for p in others}

    def flat(pictures: NDArray[np.uint8]) -> NDArray[np.float64]:
        return pictures.reshape(len(pictures), -1) / 255 - 0.5

    train, judged = flat(images), flat(others)
    values, vectors = np.linalg.eigh(train @ train.T)
    targets = vectors.T @ (np.eye(10)[labels] - 0.1)
    best = 0.0
    for strength in (1e1, 1e2, 1e3):
        scores = judged @ (train.T @ (vectors @ (targets / (values + strength)[:, None])))
        best = max(best, float((scores.argmax(1) == answers).mean()))
    assert 0.12 < best < 0.6  # better than chance, so the measure works, and far from solved


class Draws:
    """Stands in for drawing: quick, and counted."""

    def __init__(self) -> None:
        self.count = 0

    def draw(self, split: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        self.count += 1
        images = np.full((count, 32, 32, 3), 7 + len(split), np.uint8)
        return images, np.arange(count, dtype=np.int64) % 10


@pytest.fixture
def draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draws:
    counted = Draws()
    monkeypatch.setattr(shapes, "draw_shapes", counted.draw)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return counted


def opened() -> Source:
    return open_source(make_plan("data=shapes", "augment.pad=0"), None)


def check(found: Source) -> None:
    for split, count, level in ((found.training, 10_000, 12), (found.validation, 2_000, 17)):
        assert split.count == len(split.images) == len(split.labels) == count
        assert np.all(split.images == level)
        assert np.array_equal(split.labels, np.arange(count) % 10)


def test_shapes_are_drawn_once_and_then_come_from_the_cache(draws: Draws, tmp_path: Path) -> None:
    check(opened())
    assert draws.count == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2
    check(opened())
    assert draws.count == 2


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_a_damaged_cache_is_drawn_again(damage: str, draws: Draws, tmp_path: Path) -> None:
    opened()
    path = max((tmp_path / "cache").iterdir())
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    changed = {"flipped": content, "cut": content[:-1], "empty": bytearray(), "longer": content + b"x"}
    path.write_bytes(changed[damage])
    check(opened())
    assert draws.count == 3
    check(opened())
    assert draws.count == 3


def test_a_cache_that_cannot_be_written_is_only_slower(
    draws: Draws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    check(opened())
    check(opened())
    assert draws.count == 4


def test_a_version_of_its_own_keeps_older_drawings_out(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    opened()
    monkeypatch.setattr(arrays, "SHAPES_VERSION", arrays.SHAPES_VERSION + 1)
    check(opened())
    assert draws.count == 4


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert file.cache_folder() == Path("/a")
    monkeypatch.delenv("PACELINE_CACHE")
    assert file.cache_folder() == Path("/b/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert file.cache_folder() == Path("/c/.cache/paceline")
