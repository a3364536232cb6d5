"""Images in files by number: their bytes, reads that fail, the cache, and the quarantine."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from files_made import clean_pictures, file_plan
from paceline.data.index.scan import open_index
from paceline.data.load import image_files
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.data.load.quarantine import QUARANTINE, Quarantine, quarantined
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

    monkeypatch.setattr(os, "open", gone)
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
        with pytest.raises(DataError, match=r"has changed since it was indexed, .* touch its folder"):
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


def test_a_bad_image_is_listed_once_with_path_offset_and_reason(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    bad = Quarantine.of(tmp_path, 20)
    for _ in range(3):
        bad.add(part, 4, "it is cut short")
    row = part.table.rows[4]
    [line] = (tmp_path / QUARANTINE).read_text().splitlines()
    assert json.loads(line) == {
        "split": "training",
        "image": 4,
        "name": f"{part.table.shards[int(row['shard'])]} at byte {int(row['offset']):,}",
        "path": part.table.shards[int(row["shard"])],
        "offset": int(row["offset"]),
        "reason": "it is cut short",
    }
    assert len(bad) == 1


def test_training_and_validation_images_of_one_number_are_two(tars: Path, tmp_path: Path) -> None:
    bad = Quarantine.of(tmp_path, 20)
    for part in opened(tars):
        bad.add(part, 3, "it is empty")
    assert len(bad) == len(quarantined(tmp_path)) == 2


def test_replicas_and_later_starts_count_an_image_once(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    one, other = Quarantine.of(tmp_path, 2), Quarantine.of(tmp_path, 2)
    one.add(part, 1, "it is empty")
    other.add(part, 1, "it is empty")
    assert len(quarantined(tmp_path)) == len(one) == len(other) == 1
    third = Quarantine.of(tmp_path, 2)
    third.add(part, 1, "it is empty")
    assert len((tmp_path / QUARANTINE).read_text().splitlines()) <= 2
    third.add(part, 2, "it is empty")
    with pytest.raises(DataError, match=r"with it 3 images cannot be decoded, and data\.max_bad allows 2"):
        other.add(part, 3, "it is empty")


def test_zero_allows_no_bad_image_and_one_allows_one(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    with pytest.raises(DataError, match=r"\.tar at byte .*with it 1 images .* allows 0; mend them, or write a larger"):
        Quarantine.of(None, 0).add(part, 0, "it is empty")
    few = Quarantine.of(tmp_path, 1)
    few.add(part, 0, "it is empty")
    with pytest.raises(DataError, match=f"listed in {tmp_path / QUARANTINE}"):
        few.add(part, 1, "it is empty")


def test_a_line_that_a_kill_cut_short_is_passed_over(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    Quarantine.of(tmp_path, 20).add(part, 1, "it is empty")
    with (tmp_path / QUARANTINE).open("a") as file:
        file.write('{"split": "training", "image": 2, "na')
    assert [row["image"] for row in quarantined(tmp_path)] == [1]
    after = Quarantine.of(tmp_path, 20)
    after.add(part, 2, "it is empty")
    after.add(part, 3, "it is empty")
    assert sorted(int(row["image"]) for row in quarantined(tmp_path)) == [1, 2, 3]


def test_nothing_is_listed_where_there_is_no_run(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == []


def test_the_numbers_of_images_are_those_of_the_index(folder: Path) -> None:
    found = open_index(Files(name="images", classes=10), folder)
    training, validation = opened(folder)
    assert np.array_equal(found.training.rows, training.table.rows)
    assert np.array_equal(found.validation.rows, validation.table.rows)
    assert (training.split, validation.split) == ("training", "validation")


def test_too_many_bad_images_end_a_resumed_run_too(folder: Path, tmp_path: Path) -> None:
    part = opened(folder)[0]
    first = Quarantine.of(tmp_path, 0)
    with pytest.raises(DataError, match=r"data.max_bad allows 0"):
        first.add(part, 3, "it is empty")
    with pytest.raises(DataError, match=r"data.max_bad allows 0"):
        Quarantine.of(tmp_path, 0).add(part, 3, "it is empty")
    assert len(quarantined(tmp_path)) == 1


def test_images_of_an_earlier_start_count_until_they_are_mended(folder: Path, tmp_path: Path) -> None:
    parts = {part.split: part for part in opened(folder)}
    before = Quarantine.of(tmp_path, 3)
    for split_name, number in (("training", 1), ("training", 2), ("validation", 1)):
        before.add(parts[split_name], number, "it is empty")
    bad = {("training", 2)}
    looked = list[tuple[str, int]]()

    def is_bad(split_name: str, number: int) -> bool:
        looked.append((split_name, number))
        return (split_name, number) in bad

    replicas = [Quarantine.of(tmp_path, 3) for _ in range(2)]
    for number in (4, 5):
        for replica in replicas:
            replica.add(parts["training"], number, "it is empty", is_bad)
            assert len(replica) == number - 2
    assert sorted(looked) == sorted([("training", 1), ("training", 2), ("validation", 1)] * 2)
    bad.add(("training", 1))  # which is damaged once more
    with pytest.raises(DataError, match=r"with it 4 images cannot be decoded, and data\.max_bad allows 3"):
        replicas[0].add(parts["training"], 1, "it is empty", is_bad)
    assert len(quarantined(tmp_path)) == 5
