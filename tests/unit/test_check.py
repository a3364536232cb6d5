"""Checking a data set: which images are called bad, and why."""

from __future__ import annotations

import itertools
import struct
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inspect_data import CPU, DATA, PICTURES, keys_of, plan_of, table_of
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag
from paceline.data.inspect import check
from paceline.data.load.decode import decode_into
from paceline.data.load.files import FileLoader
from paceline.data.load.image_files import open_splits
from paceline.data.load.quarantine import Quarantine
from paceline.data.pack.transcode import read_encoded
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import BAD, write_folder, write_tars, write_tfrecord


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("write", [write_folder, write_tfrecord, write_tars])
def test_exactly_the_bad_pictures_are_found_in_every_format(write: Any, tmp_path: Path) -> None:
    index = open_index(DATA, write(PICTURES, tmp_path / "data"), whole=True)
    faults = list(check.find_bad_images(index, DATA, threads=2))
    bad = {"truncated": "damaged", "corrupt": "damaged", "empty": "empty"}
    assert set(bad) == set(BAD)
    if write is not write_folder:  # a folder cannot hold a label that is none
        bad["wrong"] = "label outside the classes"
    expected = {picture.key: bad[picture.odd] for picture in PICTURES if picture.odd in bad}
    assert dict(zip(keys_of(index, faults), [fault.kind for fault in faults], strict=True)) == expected
    assert keys_of(index, faults) == sorted(expected)
    assert all(fault.split == "training" and fault.name == index.training.name(fault.image) for fault in faults)
    assert all(fault.reason for fault in faults)


def test_what_is_called_bad_is_what_training_puts_aside(folder: Path) -> None:
    plan = plan_of("drop_last=true", "on.micro_batch=8")
    assert isinstance(plan.data, Files)
    bad = Quarantine(None, most=99)
    loader = FileLoader(plan, partial(open_splits, plan, plan.data, folder), 0, CPU, bad)
    with closing(loader), closing(loader.training(0)) as shares:
        for _ in itertools.islice(shares, 4 * 55 // 8):  # dropped tails leave no image out of four epochs
            pass
    found = check.find_bad_images(open_index(DATA, folder), DATA, threads=1)
    assert bad._bad == {(fault.split, fault.image) for fault in found}
    assert len(bad) == 3


def test_faults_are_the_same_whoever_looks_and_progress_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_CHUNK", 7)
    index, told = open_index(DATA, folder), []
    alone = list(check.find_bad_images(index, DATA, 1, lambda *what: told.append(what)))
    assert list(check.find_bad_images(index, DATA, 5)) == alone
    assert told[-1] == ("decoding", 60, 60)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})


def test_a_header_that_is_none_and_one_that_claims_too_much_are_told_apart(tmp_path: Path) -> None:
    write_folder(PICTURES[20:40], tmp_path)
    (tmp_path / "train/class000/text.JPEG").write_bytes(b"no picture at all")
    claim = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 100_000, 100_000, 8, 2, 0, 0, 0, 0)
    (tmp_path / "train/class001/bomb.png").write_bytes(claim)
    found = {fault.name: fault for fault in check.find_bad_images(open_index(DATA, tmp_path), DATA, 1)}
    assert found["train/class000/text.JPEG"].kind == "no image header"
    assert found["train/class001/bomb.png"].kind == "too large"
    assert "100,000 x 100,000" in found["train/class001/bomb.png"].reason
    assert len(found) == 2


def test_a_file_that_cannot_be_read_is_listed_and_does_not_end_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_PAUSE", 0)
    write_folder(PICTURES[20:40], tmp_path)
    index = open_index(DATA, tmp_path)
    gone = tmp_path / index.training.name(3)
    gone.unlink()
    (fault,) = check.find_bad_images(index, DATA, 2)
    assert (fault.image, fault.kind, fault.reason) == (3, "cannot be read", "cannot be read: No such file or directory")


def test_a_read_that_fails_once_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PAUSE", 0)
    index = open_index(DATA, write_folder(PICTURES[20:40], tmp_path))
    failed: set[Path] = set()

    def read(path: Path, offset: int, length: int) -> bytes:
        if path not in failed:
            failed.add(path)
            raise DataError(f"{path}: cannot be read: for now")
        return read_encoded(path, offset, length)

    monkeypatch.setattr(check, "read_encoded", read)
    assert list(check.find_bad_images(index, DATA, 1)) == []
    assert len(failed) == 20


def test_turned_images_are_judged_turned_where_the_data_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, boxes = DATA.model_copy(update={"orientation": "honor"}), []

    def decode(encoded: bytes, flags: int, width: int, height: int, box: Any, *rest: Any, turn: bool) -> None:
        boxes.append((turn, bool(flags & Flag.ACROSS), (width, height), tuple(box[2:])))
        decode_into(encoded, flags, width, height, box, *rest, turn=turn)

    monkeypatch.setattr(check, "decode_into", decode)
    assert len(list(check.find_bad_images(open_index(data, folder), data, 1))) == 3
    assert [across for _, across, _, _ in boxes].count(True) == 1
    for turn, across, size, box in boxes:
        assert turn
        assert box == (size if across else size[::-1])


def test_images_with_the_key_and_label_of_another_are_counted() -> None:
    rows = [{"label": label} for label in (0, 0, 1, 1, 1, 1)]
    assert check.count_repeated(table_of(*rows, keys=["a", "a", "a", "b", "b", "b"])) == 3
    assert check.count_repeated(table_of(*rows, keys=["a", "b", "c", "d", "e", "f"])) == 0
    assert check.count_repeated(table_of()) == 0
