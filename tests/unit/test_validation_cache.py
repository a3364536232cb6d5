"""Validation pictures that stay decoded: the same judgment, without reading anything again."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from image_files import Seen, clean_pictures, file_plan, judged, loading, same, spoilt
from paceline.data.index import file
from paceline.data.load import validation_cache
from paceline.data.load.quarantine import quarantined
from pictures_made import split, write_folder, write_tars

PICTURES = clean_pictures(60)
JUDGED = sorted(split(PICTURES, 1 / 7)[1], key=lambda picture: picture.key)
WORDS = ("on.loader_workers=2", "on.micro_batch=4", "on.decoded_validation=true")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(PICTURES, tmp_path / "data", 1 / 7)


@pytest.fixture
def plain(folder: Path) -> Seen:
    """What is judged when nothing is kept."""
    return judged(file_plan(folder, *WORDS[:2]), folder)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of everything that is read from here on."""
    real, found = os.pread, list[int]()

    def counted(file: int, count: int, offset: int) -> bytes:
        found.append(count)
        return real(file, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    return found


def kept_file(folder: Path, ending: str = "pictures") -> Path:
    [found] = (folder / ".paceline").glob(f"validation-*.{ending}")
    return found


def test_what_was_decoded_once_is_never_read_again(folder: Path, plain: Seen, reads: list[int]) -> None:
    plan = file_plan(folder, *WORDS)
    assert same(judged(plan, folder), plain)
    assert len(reads) >= len(JUDGED)
    reads.clear()
    for words in ((), ("on.replicas=2",), ("on.loader_workers=1", "seed=7", "epochs=3")):
        assert same(judged(file_plan(folder, *WORDS, *words), folder), plain)
    assert reads == []


def flip_pixels(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def zero(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("ending", ["pictures", "marks"])
@pytest.mark.parametrize("damage", [flip_pixels, cut, zero, lengthen, Path.unlink])
def test_a_damaged_file_is_mended_by_decoding_again(
    folder: Path, plain: Seen, ending: str, damage: Callable[[Path], None]
) -> None:
    plan = file_plan(folder, *WORDS)
    judged(plan, folder)
    whole = kept_file(folder).read_bytes()
    damage(kept_file(folder, ending))
    assert same(judged(plan, folder), plain)
    assert same(judged(plan, folder), plain)
    assert kept_file(folder).read_bytes() == whole


def test_one_damaged_picture_is_the_only_one_to_be_decoded_again(folder: Path, plain: Seen, reads: list[int]) -> None:
    plan = file_plan(folder, *WORDS)
    judged(plan, folder)
    reads.clear()
    flip_pixels(kept_file(folder))
    assert same(judged(plan, folder), plain)
    assert len(reads) == 1


@pytest.mark.parametrize(
    "words",
    ["data.evaluation.short=24", "data.resize=bicubic", "data.evaluation_side=12", "data.orientation=honor",
     "on.decoder=pillow", "data.evaluation={name: squash}"],
)  # fmt: skip
def test_settings_that_make_other_pictures_keep_others(folder: Path, words: str) -> None:
    judged(file_plan(folder, *WORDS), folder)
    assert same(judged(file_plan(folder, *WORDS, words), folder), judged(file_plan(folder, *WORDS[:2], words), folder))


def test_pictures_that_changed_on_disk_are_decoded_again(tmp_path: Path) -> None:
    """Other pictures of the same sizes leave an index that is the same but for the time."""
    folder = write_tars(PICTURES, tmp_path / "tars", 1 / 7)
    plan = file_plan(folder, *WORDS)
    before = judged(plan, folder)
    tar = folder / "val-000000.tar"
    content = bytearray(tar.read_bytes())
    place = content.index(JUDGED[2].bytes)
    sampled = place + JUDGED[2].bytes.index(b"\xff\xdb") + 10
    content[sampled] += 5  # a number of a quantization table: other colors in as many bytes
    tar.write_bytes(content)
    os.utime(tar, ns=(1, 1))
    plain = judged(file_plan(folder, *WORDS[:2]), folder)
    assert not same(before, plain)
    assert same(judged(file_plan(folder, *WORDS), folder), plain)


def test_every_run_lists_bad_images_and_shows_their_neighbors(tmp_path: Path) -> None:
    bad = {JUDGED[0].key, JUDGED[1].key, JUDGED[-1].key}
    made = [spoilt(picture, "truncated") if picture.key in bad else picture for picture in PICTURES]
    folder = write_folder(made, tmp_path / "data", 1 / 7)
    plain = judged(file_plan(folder, *WORDS[:2]), folder)
    assert np.array_equal(plain[0][0], plain[0][2])
    for name in ("one", "two"):
        run = tmp_path / name
        run.mkdir()
        assert same(judged(file_plan(folder, *WORDS), folder, run), plain)
        assert sorted(int(row["image"]) for row in quarantined(run)) == [0, 1, len(JUDGED) - 1]


def test_where_there_is_no_room_nothing_is_kept(folder: Path, plain: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert same(judged(file_plan(folder, *WORDS), folder), plain)
    monkeypatch.undo()
    monkeypatch.setattr(file, "lasting_folder", lambda _: None)
    assert same(judged(file_plan(folder, *WORDS), folder), plain)
    assert not list((folder / ".paceline").glob("validation-*"))


@pytest.mark.parametrize("name", ["_mapped", "_remove_old"])
def test_where_another_user_keeps_pictures_they_are_decoded(
    folder: Path, plain: Seen, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(validation_cache, name, refused)
    assert same(judged(file_plan(folder, *WORDS), folder), plain)


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / ".paceline").glob("validation-*"))


def judge_at(folder: Path, side: int) -> Seen:
    """What a run that judges at this side sees, once the runs before it are truly over."""
    gc.collect()
    return judged(file_plan(folder, *WORDS, f"data.evaluation_side={side}"), folder)


def test_pictures_of_the_last_two_settings_stay(folder: Path, reads: list[int]) -> None:
    judge_at(folder, 8)
    oldest = kept_files(folder)
    for side in (10, 8, 12):  # the first is used again before the third comes
        judge_at(folder, side)
    assert len(kept_files(folder)) == 4
    assert set(oldest) < set(kept_files(folder))
    reads.clear()
    for side in (8, 12):
        judge_at(folder, side)
    assert reads == []
    judge_at(folder, 10)
    assert len(reads) >= len(JUDGED)


def test_pictures_that_a_run_has_open_stay(folder: Path, plain: Seen) -> None:
    with loading(file_plan(folder, *WORDS), folder):
        in_use = kept_files(folder)
        for side in (8, 10, 12):
            judge_at(folder, side)
        assert len(kept_files(folder)) == 6
        assert set(in_use) < set(kept_files(folder))
    assert same(judged(file_plan(folder, *WORDS), folder), plain)
    judge_at(folder, 14)
    assert len(kept_files(folder)) == 4
    assert set(in_use) < set(kept_files(folder))


def test_pictures_without_their_marks_are_removed_too(folder: Path) -> None:
    judge_at(folder, 8)
    kept_file(folder, "marks").unlink()
    [left] = kept_files(folder)
    for side in (10, 12):
        judge_at(folder, side)
    assert left not in kept_files(folder)


def test_where_locks_do_not_work_nothing_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    for side in (8, 10, 12):
        judge_at(folder, side)
    assert len(kept_files(folder)) == 6
