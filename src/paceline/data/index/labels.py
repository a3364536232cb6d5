"""Which class an image is of: by its folder, by the number in its file, or by a file of labels."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.formats import UNLABELED, Found
from paceline.errors import DataError
from paceline.settings.data import Files

Numbers = NDArray[np.int64]
Class = str | int
"""A class by name, or by number as the file counts."""

IMAGENET_CLASSES = 1000

_HEADINGS = {
    "file", "filename", "filenames", "file_name", "filepath", "file_path", "folder", "id", "image", "images",
    "image_id", "image_name", "image_path", "img", "img_path", "key", "name", "path",
}  # fmt: skip
"""What the first cell of a heading may be."""
_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS = 10
"""Of a class number, with its sign: what is longer does not fit a row."""
_MOST_SHOWN = 80
_Line = tuple[str, str, Class]
"""Where it is said, of which file or folder, and what the class is."""


def read_labels(data: Files, folder: Path) -> dict[str, Class] | None:
    """The file of labels: 'file,class' lines, or a JSON map; keys are files or folders, with or without ending."""
    if data.labels is None:
        return None
    path = labels_path(data.labels, folder)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as fault:
        raise DataError(f"{path}: the file of labels (data.labels) cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: the file of labels (data.labels) is not UTF-8 text") from None
    lines = _from_json(text, path) if path.suffix.lower() == ".json" else _from_csv(text, path)
    if not lines:
        raise DataError(f"{path}: the file of labels (data.labels) is empty; write lines of 'file,class'")
    # Numbers written as text are numbers only when all are: a class may well be called '7'.
    numbers = all(isinstance(value, int) or _NUMBER.fullmatch(value) for _, _, value in lines)
    found: dict[str, Class] = {}
    for place, key, value in lines:
        if value == "":
            raise DataError(f"{place}: {_shown(key)} has no class; write one, or remove the line")
        if numbers and len(str(value)) > _DIGITS:
            raise DataError(f"{place}: {_shown(str(value))}, the class of {_shown(key)}, is too large a number")
        said = int(value) if numbers else str(value)
        if found.setdefault(key, said) != said:
            both = f"{_shown(str(found[key]))} and {_shown(str(said))}"
            raise DataError(f"{place}: {_shown(key)} has two classes, {both}; leave one of them")
    return found


def labels_path(labels: str, folder: Path) -> Path:
    """Beside the images, else as the path says."""
    beside = folder / labels
    return beside if beside.is_file() else Path(labels)


def _from_json(text: str, path: Path) -> list[_Line]:
    try:
        said = json.loads(text, object_pairs_hook=tuple)  # a map would keep the last of several classes
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, tuple) or not all(type(value) in (str, int) for _, value in said):
        raise DataError(f'{path}: expected a JSON map from files or folders to classes, such as {{"a.jpg": "cat"}}')
    return [(str(path), key.strip("/"), value.strip() if isinstance(value, str) else value) for key, value in said]


def _from_csv(text: str, path: Path) -> list[_Line]:
    found: list[_Line] = []
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path}:{number}"
        try:
            # Line by line, for a stray quote would make one cell of all lines up to the next one.
            cells = [cell.strip() for row in csv.reader([line], strict=True) for cell in row]
        except csv.Error as fault:
            raise DataError(f"{place}: {fault}; expected 'file,class', found {_shown(line)}") from None
        if not any(cells):
            continue
        if len(cells) < 2 or not cells[0].strip("/"):
            raise DataError(f"{place}: expected 'file,class', found {_shown(line)}")
        found.append((place, cells[0].strip("/"), cells[1]))
    return found[1:] if _has_heading(found) else found


def _has_heading(lines: list[_Line]) -> bool:
    """Whether the first line speaks of files and classes, or names a class where all others have numbers."""
    if not lines:
        return False
    (_, first, named), *others = lines
    if first.lower() in _HEADINGS:
        return True
    return bool(others) and not _NUMBER.fullmatch(str(named)) and all(_NUMBER.fullmatch(str(row[2])) for row in others)


def _shown(text: str) -> str:
    """What was found, as much of it as a message can hold."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


@dataclass
class Labels:
    """The class of every image, by name or by number: one of the two is -1 or UNLABELED."""

    names: list[str]
    """The class names that occur, in the order of their first image."""
    named: Numbers
    """Counts into names."""
    numbers: Numbers
    """The first class is 0."""


def label_images(founds: Sequence[Found], written: dict[str, Class] | None, first: int) -> Labels:
    """What the files, and before them the file of labels, say of every image in turn."""
    names: dict[str, int] = {}
    named, numbers = [], []
    for found in founds:
        own = found.rows["label"].astype(np.int64)
        if found.names:
            table = np.array([names.setdefault(name, len(names)) for name in found.names] + [-1], np.int64)
            inside = (own >= 0) & (own < len(found.names))
            its_names = table[np.where(inside, own, len(found.names))]
            its_numbers = np.where(inside, UNLABELED, own)
        else:
            its_names = np.full(len(own), -1, np.int64)
            its_numbers = np.where(own == UNLABELED, UNLABELED, own - first)
        for number, value in _looked_up(found, written) if written is not None else ():
            its_names[number] = names.setdefault(value, len(names)) if isinstance(value, str) else -1
            its_numbers[number] = value - first if isinstance(value, int) else UNLABELED
        named.append(its_names)
        numbers.append(its_numbers)
    empty = np.zeros(0, np.int64)
    return Labels(list(names), np.concatenate([empty, *named]), np.concatenate([empty, *numbers]))


def _looked_up(found: Found, written: dict[str, Class]) -> Iterator[tuple[int, Class]]:
    """Images of which the file of labels speaks: by path, file name or key, else by a folder, the innermost first."""
    paths, by_folder = list(found.shards), dict[str, Class | None]()
    for number, (key, shard) in enumerate(zip(found.keys, found.rows["shard"].tolist(), strict=True)):
        path = paths[shard]
        parent, _, name = path.rpartition("/")
        value = next((written[asked] for asked in (path, path.rpartition(".")[0], name, key) if asked in written), None)
        if value is None:
            if parent not in by_folder:
                by_folder[parent] = _of_folder(parent, written)
            value = by_folder[parent]
        if value is not None:
            yield number, value


def _of_folder(folder: str, written: dict[str, Class]) -> Class | None:
    while folder:
        parent, _, name = folder.rpartition("/")
        if folder in written or name in written:
            return written.get(folder, written.get(name))
        folder = parent
    return None


def class_names(
    labels: Labels, training: NDArray[np.bool_], kept: tuple[str, ...] | None, data: Files, first: int, folder: Path
) -> tuple[str, ...]:
    """The classes in their order: as the format keeps them, else sorted names of the training part, else numbers."""
    used = sorted({labels.names[number] for number in np.unique(labels.named[training]) if number >= 0})
    if kept is not None or used:
        names = kept if kept is not None else tuple(used)
        if data.classes is not None and len(names) > data.classes:
            raise DataError(f"{folder}: {len(names)} classes are here, but data.classes says {data.classes}")
        return names
    count = data.classes or (
        IMAGENET_CLASSES if data.name == "imagenet" else _counted(labels.numbers[training], folder)
    )
    return tuple(str(number + first) for number in range(count))


def _counted(numbers: Numbers, folder: Path) -> int:
    """How many classes there are when the largest label is the last one."""
    present = np.unique(numbers[numbers >= 0])
    if len(present) == 0:
        raise DataError(f"{folder}: no image has a label; write data.labels=FILE with lines of 'file,class'")
    count = int(present[-1]) + 1
    if count > 2 * len(present) + 10:
        before = present[present < 2 * len(present)]
        guess = int(before[-1]) + 1 if len(before) else len(present)
        raise DataError(
            f"{folder}: only {len(present)} of the labels up to {count - 1} occur, so one may be a mistake; "
            f"write data.classes={guess}, or whatever is right"
        )
    return count


def check_strays(final: Numbers, classes: int, first: int, place: str, named: bool = False) -> None:
    """Refuse a label outside the classes that is too common to be a slip: then it is the settings that are wrong."""
    outside = (final < 0) | (final >= classes)
    values, counts = np.unique(final[outside], return_counts=True)
    few = max(3.0, (len(final) - counts.sum()) / classes / 10)
    if len(values) == 0 or counts.max() < few:
        return
    value, count = int(values[counts.argmax()]), int(counts.max())
    if value == UNLABELED:
        raise DataError(f"{place}: {count:,} images have no label; write data.labels=FILE with lines of 'file,class'")
    more = "more data.class_names" if named else f"data.classes={value + 1}"
    remedy = f"data.first_label={value + first}" if value < 0 else more
    raise DataError(
        f"{place}: {count:,} images have label {value + first}, but classes go from {first} to {first + classes - 1}; "
        f"write {remedy}, or whatever is right"
    )
