"""Reads files of labels as people have them: CSV, TSV, semicolons, pandas' index column, a split column, JSON."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from paceline.data.index.formats import IMAGE_ENDINGS
from paceline.data.index.formats.layout import is_test, split_named
from paceline.errors import DataError
from paceline.files import read_whole
from paceline.settings.data import Files

Class = str | int
"""A class by name, or by number as the file counts."""
LabelKey = Literal["labels", "relabel"]
LabelSplit = Literal["training", "validation", "test"]
Label = TypeVar("Label", Class, str)

FILE_HEADINGS = {
    "file", "filename", "filenames", "file_name", "filepath", "file_path", "folder", "id", "image", "images",
    "image_id", "image_name", "image_path", "img", "img_path", "key", "name", "path",
}  # fmt: skip
"""How the column of files may be headed."""
_VAGUE = {"folder", "id", "image_id", "key", "name"}
_CLASSES = {
    "breed", "category", "class", "class_id", "class_label", "class_name", "classname", "diagnosis", "label",
    "label_name", "labels", "species", "target", "y",
}  # fmt: skip
_SPLITS = {"dataset_split", "part", "partition", "set", "split", "subset"}
_INDEX = {"", "unnamed: 0", "index"}
"""How the column of row numbers is headed that pandas writes."""
_DELIMITERS = ",;\t"
_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS = 10
"""The most digits of a class number, with its sign; a longer one would not fit a row."""
_MOST_SHOWN = 80


@dataclass(frozen=True)
class LabelFile:
    """The classes, and where a column says so the splits, of files and folders."""

    name: str
    classes: dict[str, Class]
    splits: dict[str, LabelSplit] = field(default_factory=dict)


class _Line(NamedTuple):
    """Where the line is (file:line), the file or folder it speaks of, its class, and the word for its split."""

    where: str
    key: str
    value: Class
    split: str = ""


class _Columns(NamedTuple):
    """Which cell of a line is what."""

    file: int = 0
    label: int = 1
    split: int | None = None


def read_labels(data: Files, folder: Path) -> LabelFile | None:
    """Read the file of labels; keys are files or folders, with or without ending."""
    path = labels_path(data, "labels", folder)
    if path is None:
        return None
    lines = _read(path, "labels", folder)
    # Numbers written as text are numbers only when all are: a class may well be called '7'.
    numbers = all(isinstance(line.value, int) or _NUMBER.fullmatch(line.value) for line in lines)
    classes: dict[str, Class] = {}
    for where, key, value, _ in lines:
        if value == "":
            raise DataError(f"{where}: {_shown(key)} has no class; write one, or remove the line")
        if numbers and len(str(value)) > _DIGITS:
            raise DataError(f"{where}: {_shown(str(value))}, the class of {_shown(key)}, is too large a number")
        _add(classes, where, key, int(value) if numbers else str(value))
    return LabelFile(path.name, classes, _splits(lines))


def read_relabels(data: Files, folder: Path) -> dict[str, str] | None:
    """Read the file that lies over the labels; an empty class leaves the image out."""
    path = labels_path(data, "relabel", folder)
    if path is None:
        return None
    classes: dict[str, str] = {}
    for where, key, value, _ in _read(path, "relabel", folder):
        _add(classes, where, key, str(value))
    return classes


def labels_path(data: Files, key: LabelKey, folder: Path) -> Path | None:
    """The path of a file of labels: inside the data folder if it is there, else as written."""
    written = getattr(data, key)
    if written is None:
        return None
    inside = folder / written
    path = inside if os.path.isfile(inside) else Path(written)  # noqa: PTH113
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - a pipe would be waited for
        raise DataError(f"{path}: the file of labels (data.{key}) is not a file; write one of 'file,class' lines")
    return path


def _read(path: Path, setting: LabelKey, folder: Path) -> list[_Line]:
    try:
        text = read_whole(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as fault:
        raise DataError(f"{path}: the file of labels (data.{setting}) cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: the file of labels (data.{setting}) is not UTF-8 text") from None
    lines = _from_json(text, path) if path.suffix.lower() in (".json", ".jsonl") else _from_table(text, path)
    if not lines:
        raise DataError(f"{path}: the file of labels (data.{setting}) is empty; write lines of 'file,class'")
    if all(_is_image(str(line.value)) and not _is_image(line.key) for line in lines):
        raise DataError(f"{lines[0].where}: the files are where the classes should be; write lines of 'file,class'")
    roots = tuple(f"{root}/" for root in dict.fromkeys([os.path.abspath(folder), os.path.realpath(folder)]))  # noqa: PTH100
    return [line._replace(key=_relative(line.key, roots)) for line in lines]


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)


def _add(classes: dict[str, Label], where: str, key: str, label: Label) -> None:
    if classes.setdefault(key, label) != label:
        both = f"{_shown(str(classes[key]))} and {_shown(str(label))}"
        raise DataError(f"{where}: {_shown(key)} has two classes, {both}; remove one of them")


def _relative(key: str, roots: Sequence[str]) -> str:
    """A path as the index has it: from the data folder on, with '/'."""
    key = key if "/" in key else key.replace("\\", "/")
    root = next((root for root in roots if key.startswith(root)), "")
    return key.removeprefix(root).removeprefix("./").strip("/")


def _splits(lines: Sequence[_Line]) -> dict[str, LabelSplit]:
    """The split of each file, where every line names one; a test split is validated on where there is no other."""
    words = {line.split.lower() for line in lines}
    if not all(word and split_named(word) for word in words):
        return {}
    validated = any(split_named(word) == "validation" and not is_test(word) for word in words)
    names: dict[str, LabelSplit] = {
        word: "test" if validated and is_test(word) else "training" if split_named(word) == "training" else "validation"
        for word in words
    }
    return {line.key: names[line.split.lower()] for line in lines}


def _from_json(text: str, path: Path) -> list[_Line]:
    """A map from files or folders to classes, one from classes to lists of files, or a list of records."""
    try:
        # A dict would keep the last of several classes of one file.
        content = json.loads(text, object_pairs_hook=tuple) if path.suffix.lower() == ".json" else [
            json.loads(line, object_pairs_hook=tuple) for line in text.split("\n") if line.strip()
        ]  # fmt: skip
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, list) and content and all(isinstance(record, tuple) for record in content):
        return _from_records([dict(record) for record in content], path)
    pairs: Sequence[tuple[str, Any]] = content if isinstance(content, tuple) else [("", None)]
    if pairs and all(isinstance(value, list) and all(isinstance(file, str) for file in value) for _, value in pairs):
        return [_Line(str(path), file, label) for label, files in pairs for file in files]
    if not all(type(value) in (str, int) for _, value in pairs):
        raise DataError(f'{path}: expected a JSON map from files or folders to classes, such as {{"a.jpg": "cat"}}')
    return [_Line(str(path), key, value.strip() if isinstance(value, str) else value) for key, value in pairs]


def _from_records(records: list[dict[str, Any]], path: Path) -> list[_Line]:
    columns = _named_columns(list(records[0]))
    if columns is None:
        raise DataError(f'{path}: expected records such as {{"file": "a.jpg", "class": "cat"}}')
    names = list(records[0])
    file, label, split = (
        names[columns.file],
        names[columns.label],
        names[columns.split] if columns.split is not None else "",
    )
    lines = []
    for number, record in enumerate(records, start=1):
        value: Any = record.get(label)
        if not isinstance(record.get(file), str) or type(value) not in (str, int):
            raise DataError(f"{path}: record {number} has no '{file}' or no '{label}'; write both, as text")
        lines.append(_Line(f"{path}: record {number}", record[file], value, str(record.get(split, ""))))
    return lines


def _from_table(text: str, path: Path) -> list[_Line]:
    rows = _rows(text, path)
    columns = _Columns()
    if rows and (named := _named_columns(rows[0][2])) is not None:
        rows, columns = rows[1:], named
    lines = []
    for where, line, cells in rows:
        if len(cells) <= max(columns.file, columns.label) or not cells[columns.file].strip("/"):
            raise DataError(f"{where}: expected 'file,class', found {_shown(line)}")
        split = cells[columns.split] if columns.split is not None and columns.split < len(cells) else ""
        lines.append(_Line(where, cells[columns.file], cells[columns.label], split))
    return lines[1:] if _has_header(lines) else lines


def _rows(text: str, path: Path) -> list[tuple[str, str, list[str]]]:
    """The lines that hold anything: where each is, its text, and its cells."""
    written = [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), start=1)]
    delimiter = _delimiter([line for _, line in written if line.strip()], path)
    rows = []
    for where, line in written:
        try:
            # Line by line: a stray quote would make one cell of all lines up to the next quote.
            cells = _cells(line, delimiter)
        except csv.Error as fault:
            raise DataError(f"{where}: {fault}; expected 'file,class', found {_shown(line)}") from None
        if any(cells):
            rows.append((where, line, cells))
    return rows


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return line.split()
    return [cell.strip() for row in csv.reader([line], delimiter=delimiter, strict=True) for cell in row]


def _delimiter(lines: Sequence[str], path: Path) -> str:
    """What stands between the cells: what comes first in the first line and parts every line; a comma if in doubt."""
    if not lines:
        return ","
    outside_quotes = re.sub(r'"[^"]*"', "", lines[0])
    found = sorted((outside_quotes.index(mark), mark) for mark in _DELIMITERS if mark in outside_quotes)
    marks = ["\t"] if path.suffix.lower() == ".tsv" else [mark for _, mark in found]
    parting = [mark for mark in marks if all(mark in line for line in lines)]
    if not found and all(len(line.split()) == 2 for line in lines):
        return " "
    return next(iter(parting), ",")


def _named_columns(cells: Sequence[str]) -> _Columns | None:
    """The columns that a header line names, in any order; None where it does not name both a file and a class."""
    names = [str(cell).strip().lower() for cell in cells]
    if len(names) > 2 and names[0] in _INDEX:
        return _named_columns(["-", *cells[1:]]) or (_Columns(1, 2) if names[1] in FILE_HEADINGS else None)
    label = next((number for number, name in enumerate(names) if name in _CLASSES), None)
    # 'id' and 'name' may be those of the image, unless another column says 'file'.
    files = [number for number, name in enumerate(names) if name in FILE_HEADINGS and number != label]
    file = min(files, key=lambda number: (names[number] in _VAGUE, number), default=None)
    split = next((number for number, name in enumerate(names) if name in _SPLITS), None)
    return None if file is None or label is None else _Columns(file, label, split)


def _has_header(lines: list[_Line]) -> bool:
    """Whether the first line is a header: it says 'file' or the like, or has a word where all others have numbers."""
    if not lines:
        return False
    first, *others = lines
    if first.key.strip("/").lower() in FILE_HEADINGS:
        return True
    numbers = [bool(_NUMBER.fullmatch(str(line.value))) for line in others]
    return bool(others) and not _NUMBER.fullmatch(str(first.value)) and all(numbers)


def _shown(text: str) -> str:
    """A text in quotes, cut to what a message can hold."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
