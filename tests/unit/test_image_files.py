"""Images in files by index: their bytes, reads that fail, and the cache."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from image_files import clean_pictures, file_plan
from paceline.data.index.scan import open_index
from paceline.data.load import image_files
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.errors import INTERRUPTED, DataError, ReadFailed
from paceline.settings.data import Files
from pictures_made import split, write_folder, write_tars

PICTURES = clean_pictures(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("files"), 1 / 7)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(PICTURES, tmp_path_factory.mktemp("tars"), 1 / 7)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts to read follow one another at once."""
    monkeypatch.setattr(image_files, "PAUSES", (0.0,) * 5)


def opened(folder: Path, cache: int = 0) -> tuple[ImageFiles, ImageFiles]:
    plan = file_plan(folder, f"on.cache={cache}")
    assert isinstance(plan.data, Files)
    return open_splits(plan, plan.data, folder)


Pread = Callable[[int, int, int], bytes]


def failing(times: int, real: Pread, number: int = errno.EIO) -> Pread:
    """os.pread that fails so many times first."""
    left = [times]

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor, count, offset)

    return pread


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_images_are_read_by_number_whatever_holds_them(request: pytest.FixtureRequest, kind: str) -> None:
    for part, pictures in zip(opened(request.getfixturevalue(kind)), split(PICTURES, 1 / 7), strict=True):
        ranked = sorted(pictures, key=lambda picture: picture.key)
        assert [part.read(number) for number in range(part.count)] == [picture.bytes for picture in ranked]
        assert part.labels_of(np.arange(part.count)).tolist() == [picture.label for picture in ranked]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("times", [1, 5])
def test_a_read_that_fails_is_tried_again(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(folder)[0]
    expected = part.read(3)
    monkeypatch.setattr(os, "pread", failing(times, os.pread))
    assert part.read(3) == expected


def test_attempts_wait_longer_and_longer_but_not_for_minutes() -> None:
    assert list(image_files.PAUSES) == sorted(image_files.PAUSES)
    assert 10 <= sum(image_files.PAUSES) <= 30


@pytest.mark.usefixtures("hasty")
def test_a_read_that_fails_again_and_again_ends_the_run_to_be_taken_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = opened(folder)[0]
    monkeypatch.setattr(os, "pread", failing(6, os.pread, errno.ESTALE))
    with pytest.raises(
        ReadFailed, match=r"train/class\d+/picture_\d+\.JPEG: cannot be read \(.*; 6 attempts\); go on"
    ) as told:
        part.read(5)
    assert told.value.status == INTERRUPTED
    assert os.strerror(errno.ESTALE) in str(told.value)
    assert part.read(5)


@pytest.mark.usefixtures("hasty")
def test_once_a_read_has_failed_for_good_the_others_do_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is gone has thousands of images ahead, and each would take its own attempts."""
    part, attempts = opened(folder)[0], [0]

    def gone(*_: object) -> int:
        attempts[0] += 1
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "pread", gone)
    for expected in (6, 7, 8):
        with pytest.raises(ReadFailed):
            part.read(expected)
        assert attempts[0] == expected


@pytest.mark.usefixtures("hasty")
def test_a_removed_file_is_a_failing_read_and_a_changed_one_says_so(tmp_path: Path) -> None:
    folder = write_folder(PICTURES, tmp_path, 1 / 7)
    part = opened(folder)[0]
    gone, cut, grown = (folder / part.table.name(number) for number in (0, 1, 2))
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-10])
    grown.write_bytes(grown.read_bytes() + b"more")
    with pytest.raises(ReadFailed, match="No such file or directory"):
        part.read(0)
    for number in (1, 2):
        with pytest.raises(DataError, match=r"has changed since it was indexed; touch its folder"):
            part.read(number)


def test_a_read_that_gives_less_than_asked_for_goes_on(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real = opened(tars)[0].read(7), os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: real(file, min(count, 100), offset))
    assert opened(tars)[0].read(7) == expected


@pytest.mark.usefixtures("hasty")
def test_files_are_closed_whatever_happens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(folder)[0]
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir())) if open_files.is_dir() else None
    part.read(0)
    monkeypatch.setattr(os, "pread", failing(10**9, os.pread))
    with pytest.raises(ReadFailed):
        part.read(1)
    assert before is None or len(list(open_files.iterdir())) == before


def test_the_cache_stays_within_its_budget_over_both_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sorted(len(picture.bytes) for picture in PICTURES)
    budget = sum(sizes) // 2
    parts = opened(folder, budget)
    contents = [[part.read(number) for number in range(part.count)] for part in parts]
    real, read = os.pread, []

    def counted(file: int, count: int, offset: int) -> bytes:
        read.append(count)
        return real(file, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert [[part.read(number) for number in range(part.count)] for part in parts] == contents
    kept = sum(sizes) - sum(read)
    assert budget - sizes[-1] < kept <= budget


def test_a_cache_that_is_large_enough_reads_everything_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = opened(folder, 1 << 24)[0]
    contents = [part.read(number) for number in range(part.count)]
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was read again"))
    assert [part.read(number) for number in range(part.count)] == contents


def test_threads_that_read_the_same_image_count_it_once(folder: Path) -> None:
    part = opened(folder, 1 << 24)[0]
    together = threading.Barrier(8)

    def work() -> None:
        together.wait()
        for number in range(part.count):
            part.read(number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert part.cache._used[0] == sum(len(part.read(number)) for number in range(part.count))


def test_a_replacement_is_looked_for_among_all_others_around_the_end(folder: Path) -> None:
    part = opened(folder)[0]
    last = part.count - 1
    assert list(part.after(last)) == list(range(last))
    assert list(part.after(2))[:3] == [3, 4, 5]
    assert list(part.after(2))[-2:] == [0, 1]


def test_the_numbers_of_images_are_those_of_the_index(folder: Path) -> None:
    found = open_index(Files(name="images", classes=10), folder)
    training, validation = opened(folder)
    assert np.array_equal(found.training.rows, training.table.rows)
    assert np.array_equal(found.validation.rows, validation.table.rows)
    assert (training.split, validation.split) == ("training", "validation")
