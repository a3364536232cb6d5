"""A file that grows is read line by line, each once, whatever happens to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.files import Tail


def write(path: Path, text: str, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.write(text)


def lines(*numbers: int) -> str:
    return "".join(f"{json.dumps({'n': number, 'rest': 2000 * 'x'})}\n" for number in numbers)


def numbers_of(tail: Tail) -> tuple[list[int], bool]:
    rows, replaced = tail.read()
    return [row["n"] for row in rows], replaced


def test_every_line_is_read_once_and_only_new_bytes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    assert numbers_of(tail) == ([], False)
    write(path, lines(1, 2))
    assert numbers_of(tail) == ([1, 2], False)
    write(path, lines(*range(3, 2000)))
    assert numbers_of(tail) == (list(range(3, 2000)), False)
    monkeypatch.setattr("paceline.files.open_file", None)  # a file that has not changed is not even opened
    assert numbers_of(tail) == ([], False)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    write(path, lines(1) + '{"n"')
    assert numbers_of(tail) == ([1], False)
    write(path, ": 2}\n")
    assert numbers_of(tail) == ([2], False)


@pytest.mark.parametrize("looked", [True, False])
def test_half_a_line_that_is_cut_off_is_never_seen(tmp_path: Path, looked: bool) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    write(path, lines(1))
    tail.read()
    write(path, '{"n": 2, "torn')
    if looked:
        assert numbers_of(tail) == ([], False)
    os.truncate(path, len(lines(1)))
    write(path, lines(2, 3))
    assert numbers_of(tail) == ([2, 3], False)


@pytest.mark.parametrize("count", [1, 3, 500])
@pytest.mark.parametrize("rename", [True, False])
def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path, count: int, rename: bool) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    write(path, lines(1, 2))
    tail.read()
    others = list(range(7, 7 + count))
    if rename:
        write(tmp_path / "other", lines(*others))
        (tmp_path / "other").replace(path)
    else:
        write(path, lines(*others), "w")
    assert numbers_of(tail) == (others, True)
    assert numbers_of(tail) == ([], False)


def test_a_file_that_goes_away_and_comes_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    write(path, lines(1, 2))
    tail.read()
    path.unlink()
    assert numbers_of(tail) == ([], True)
    assert numbers_of(tail) == ([], False)
    write(path, lines(1, 2, 3))
    assert numbers_of(tail) == ([1, 2, 3], False)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    tail = Tail(path)
    write(path, lines(1, 2, 3))
    tail.read()
    os.truncate(path, len(lines(1)))
    assert numbers_of(tail) == ([1], True)


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"n": 1}\n\n{broken}\n{"n": 2}\n')
    assert numbers_of(Tail(path)) == ([1, 2], False)
