"""Tables: what is known of every image, in fixed-width rows, and how it is kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data.index import file
from paceline.data.index.table import ROW, Flag, Strings, Table

TEXTS = ["a", "", "größe", "caf\udce9", "z" * 300]
"""One of them is a file name that is not UTF-8, as Python spells it."""


def test_a_row_is_36_bytes_without_gaps() -> None:
    assert ROW.itemsize == 36
    assert sum(ROW[name].itemsize for name in ROW.names or ()) == 36


def test_texts_come_back_as_they_went_in() -> None:
    strings = Strings.of(TEXTS)
    assert len(strings) == 5
    assert list(strings) == [strings[number] for number in range(5)] == TEXTS
    assert list(Strings.of([])) == list(Strings.joined([])) == []
    assert list(Strings.joined([strings, Strings.of([]), strings])) == TEXTS * 2


@pytest.mark.parametrize("number", [-1, 5])
def test_a_text_that_is_not_there_is_a_fault_of_ours(number: int) -> None:
    with pytest.raises(IndexError):
        Strings.of(TEXTS)[number]


def test_an_image_is_named_by_its_file_or_by_its_place_in_a_shard() -> None:
    rows = np.zeros(2, ROW)
    rows["shard"], rows["offset"] = [0, 1], [0, 1536]
    rows["first_object"], rows["objects"] = [0, 1], [1, 2]
    objects = np.arange(12, dtype=np.float32).reshape(3, 4)
    table = Table(rows, Strings.of(["train/n01440764/x.JPEG", "train-00001.tar"]), Strings.of(["x", "y"]), objects)
    assert len(table) == 2
    assert [table.name(0), table.name(1)] == ["train/n01440764/x.JPEG", "train-00001.tar at byte 1,536"]
    assert table.objects_of(0).tolist() == [[0, 1, 2, 3]]
    assert table.objects_of(1).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_flags_fit_their_column() -> None:
    assert int(max(Flag)) < 1 << 16
    assert len({int(flag) for flag in Flag}) == len(Flag)


def arrays() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    rows = np.zeros(3, ROW)
    rows["label"] = [3, -1, 2]
    return {"rows": rows, "empty": np.zeros((0, 4), np.float32), "ends": np.arange(7, dtype=np.uint64)}


def test_arrays_are_read_from_disk_as_they_were_written(tmp_path: Path) -> None:
    file.write_arrays(tmp_path / "a.bin", {"kind": "folder"}, arrays())
    stored = file.read_arrays(tmp_path / "a.bin")
    assert stored is not None
    assert stored.header == {"kind": "folder"}
    for name, array in arrays().items():
        assert stored.arrays[name].dtype == array.dtype
        assert np.array_equal(stored.arrays[name], array)
    with pytest.raises(ValueError, match="read-only"):
        stored.arrays["ends"][0] = 1


def test_what_is_cut_or_something_else_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    file.write_arrays(path, {"kind": "folder"}, arrays())
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:40], whole[:12], b"", b"x" * 200, whole[:8] + b"\xff" * 8 + whole[16:]):
        path.write_bytes(content)
        assert file.read_arrays(path) is None
    assert file.read_arrays(tmp_path / "missing") is None


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    file.write_arrays(path, {"number": 1}, {})
    with pytest.raises(TypeError):
        file.write_arrays(path, {"number": object()}, {})
    assert (stored := file.read_arrays(path)) is not None
    assert stored.header == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_a_file_that_is_replaced_stays_as_it_was_for_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    file.write_arrays(path, {}, {"numbers": np.arange(10_000)})
    before = file.read_arrays(path)
    file.write_arrays(path, {}, {"numbers": np.zeros(3, np.int64)})
    assert before is not None
    assert np.array_equal(before.arrays["numbers"], np.arange(10_000))
