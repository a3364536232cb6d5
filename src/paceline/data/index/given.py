"""Images that a person names one by one: files, folders, patterns, tables of paths, and lists on standard input."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.index.formats import IMAGE_ENDINGS, is_folder, visible_entries
from paceline.data.index.image_header import read_header
from paceline.data.index.label_file import FILE_HEADINGS
from paceline.data.index.table import ROW, Flag, Strings, Table
from paceline.errors import DataError
from paceline.files import open_file, read_whole

_TABLES = (".csv", ".tsv")
_DELIMITERS = ",;\t"


@dataclass(frozen=True)
class GivenImages:
    """Paths of files that can be read, in the order they were named, and those that cannot, with the reason."""

    table: Table
    unreadable: dict[str, str]

    @property
    def paths(self) -> list[str]:
        """The path of each image, as it was written."""
        return list(self.table.shards)


def find_images(words: Sequence[str], lines: Iterator[str]) -> GivenImages:
    """The images that words stand for; `lines` are the paths that the word '-' stands for."""
    paths = [path for word in words for path in _paths(word, lines)]
    return read_given(list(dict.fromkeys(paths)))


def read_given(paths: Sequence[str]) -> GivenImages:
    """Read the headers of files; the content of one that is no image is judged when it is decoded."""
    rows, shards, unreadable = [], list[str](), dict[str, str]()
    for path in paths:
        try:
            with open_file(Path(path)) as file:
                length = os.fstat(file.fileno()).st_size
                header = read_header(file.fileno(), 0, length) if length < 1 << 32 else (0, 0, Flag.UNREADABLE)
        except OSError as fault:
            unreadable[path] = fault.strerror or str(fault)
            continue
        rows.append((0, length % (1 << 32), len(shards), 0, header[0], header[1], 0, 0, int(header[2])))
        shards.append(path)
    names = Strings.of(shards)
    return GivenImages(Table(np.array(rows, ROW), names, names, np.zeros((0, 4), np.float32)), unreadable)


def _paths(word: str, lines: Iterator[str]) -> list[str]:
    """The paths that one word stands for; one that stands for nothing is refused."""
    if word == "-":
        paths = [line.rstrip("\r\n") for line in lines if line.strip()]
        if not paths:
            raise DataError("-: standard input names no image; write one path to a line")
        return paths
    if os.path.isdir(word):  # noqa: PTH112 - where it may not be looked into, the folder says so
        return _in_folder(Path(word))
    if word.lower().endswith(_TABLES):
        return _in_table(Path(word))
    if os.path.lexists(word):
        return [word]
    matches = sorted(glob.glob(word, recursive=True)) if glob.has_magic(word) else []  # noqa: PTH207 - keeps './'
    if not matches:
        what = "no file matches" if glob.has_magic(word) else "there is no such file or folder"
        raise DataError(f"{word}: {what}; name images, folders, a CSV file of paths, or - to read paths from a pipe")
    return [path for match in matches for path in (_in_folder(Path(match)) if Path(match).is_dir() else [match])]


def _in_folder(folder: Path) -> list[str]:
    """Every image in a folder and below it, sorted."""
    found = list(_walk(folder))
    if not found:
        raise DataError(f"{folder}: there are no images here ({', '.join(IMAGE_ENDINGS[:5])} ...)")
    return found


def _walk(folder: Path) -> Iterator[str]:
    for entry in sorted(visible_entries(folder), key=lambda entry: entry.name):
        if entry.name.lower().endswith(IMAGE_ENDINGS):
            yield entry.path
        elif is_folder(entry):
            yield from _walk(Path(entry.path))


def _in_table(path: Path) -> list[str]:
    """The paths of a table: of its column with a usual heading, else of its first; beside the table or as written."""
    try:
        text = read_whole(path).decode("utf-8-sig")
    except OSError as fault:
        raise DataError(f"{path}: cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text") from None
    lines = text.splitlines()
    first = lines[0] if lines else ""
    delimiter = max(_DELIMITERS, key=first.count)
    rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    headings = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = next((index for index, cell in enumerate(headings) if cell in FILE_HEADINGS), None)
    cells = [row[column or 0] for row in rows[0 if column is None else 1 :] if len(row) > (column or 0)]
    if not cells:
        raise DataError(f"{path}: names no image; write one path to a line, under a heading 'file' if you like")
    return [_beside(cell.strip(), path.parent) for cell in cells]


def _beside(cell: str, folder: Path) -> str:
    inside = folder / cell
    return str(inside) if os.path.lexists(inside) else cell
