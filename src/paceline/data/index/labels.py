"""Finds the class of every image: from its folder, from the number in its file, or from a file of labels."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.formats import UNLABELED, UnitImages
from paceline.errors import DataError
from paceline.files import read_whole
from paceline.numpy_types import Int64s
from paceline.settings.data import Files

Class = str | int
"""A class by name, or by number as the file counts."""

IMAGENET_CLASSES = 1000

HEADINGS = {
    "file", "filename", "filenames", "file_name", "filepath", "file_path", "folder", "id", "image", "images",
    "image_id", "image_name", "image_path", "img", "img_path", "key", "name", "path",
}  # fmt: skip
"""What the first cell of a header line may be."""
_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS = 10
"""The most digits of a class number, with its sign; a longer one would not fit a row."""
_MOST_SHOWN = 80
_Line = tuple[str, str, Class]
"""Where the line is (file:line), the file or folder it speaks of, and the class."""


def read_labels(data: Files, folder: Path) -> dict[str, Class] | None:
    """Read the file of labels: 'file,class' lines, or a JSON map; keys are files or folders, with or without ending."""
    if data.labels is None:
        return None
    path = labels_path(data.labels, folder)
    try:
        text = read_whole(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as fault:
        raise DataError(f"{path}: the file of labels (data.labels) cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: the file of labels (data.labels) is not UTF-8 text") from None
    lines = _from_json(text, path) if path.suffix.lower() == ".json" else _from_csv(text, path)
    if not lines:
        raise DataError(f"{path}: the file of labels (data.labels) is empty; write lines of 'file,class'")
    # Numbers written as text are numbers only when all are: a class may well be called '7'.
    numbers = all(isinstance(value, int) or _NUMBER.fullmatch(value) for _, _, value in lines)
    classes: dict[str, Class] = {}
    for where, key, value in lines:
        if value == "":
            raise DataError(f"{where}: {_shown(key)} has no class; write one, or remove the line")
        if numbers and len(str(value)) > _DIGITS:
            raise DataError(f"{where}: {_shown(str(value))}, the class of {_shown(key)}, is too large a number")
        label = int(value) if numbers else str(value)
        if classes.setdefault(key, label) != label:
            both = f"{_shown(str(classes[key]))} and {_shown(str(label))}"
            raise DataError(f"{where}: {_shown(key)} has two classes, {both}; remove one of them")
    return classes


def labels_path(labels: str, folder: Path) -> Path:
    """The path of the file of labels: inside the data folder if it is there, else as written."""
    inside = folder / labels
    path = inside if os.path.isfile(inside) else Path(labels)  # noqa: PTH113
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - a pipe would be waited for
        raise DataError(f"{path}: the file of labels (data.labels) is not a file; write one of 'file,class' lines")
    return path


def _from_json(text: str, path: Path) -> list[_Line]:
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)  # a dict would keep the last of several classes
    except (ValueError, RecursionError):
        pairs = None
    if not isinstance(pairs, tuple) or not all(type(value) in (str, int) for _, value in pairs):
        raise DataError(f'{path}: expected a JSON map from files or folders to classes, such as {{"a.jpg": "cat"}}')
    return [(str(path), key.strip("/"), value.strip() if isinstance(value, str) else value) for key, value in pairs]


def _from_csv(text: str, path: Path) -> list[_Line]:
    lines: list[_Line] = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{line_number}"
        try:
            # Line by line: a stray quote would make one cell of all lines up to the next quote.
            cells = [cell.strip() for row in csv.reader([line], strict=True) for cell in row]
        except csv.Error as fault:
            raise DataError(f"{where}: {fault}; expected 'file,class', found {_shown(line)}") from None
        if not any(cells):
            continue
        if len(cells) < 2 or not cells[0].strip("/"):
            raise DataError(f"{where}: expected 'file,class', found {_shown(line)}")
        lines.append((where, cells[0].strip("/"), cells[1]))
    return lines[1:] if _has_header(lines) else lines


def _has_header(lines: list[_Line]) -> bool:
    """Whether the first line is a header: it says 'file' or the like, or has a word where all others have numbers."""
    if not lines:
        return False
    (_, first, label), *others = lines
    if first.lower() in HEADINGS:
        return True
    return bool(others) and not _NUMBER.fullmatch(str(label)) and all(_NUMBER.fullmatch(str(row[2])) for row in others)


def _shown(text: str) -> str:
    """A text in quotes, cut to what a message can hold."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


@dataclass
class Labels:
    """The class of every image, by name or by number; where one is known, the other is -1 (named) or UNLABELED."""

    names: list[str]
    """The class names that occur, in the order of their first image."""
    named: Int64s
    """For each image an index into names."""
    numbers: Int64s
    """For each image its class number, counted from 0."""


def label_images(by_unit: Sequence[UnitImages], label_file: dict[str, Class] | None, first: int) -> Labels:
    """Find the class of every image in turn; the file of labels overrides what the image files say."""
    names: dict[str, int] = {}
    named, numbers = [], []
    for images in by_unit:
        own = images.rows["label"].astype(np.int64)
        if images.names:
            # Labels count into the names of the unit; labels outside of them pick the extra last entry, -1.
            table = np.array([names.setdefault(name, len(names)) for name in images.names] + [-1], np.int64)
            inside = (own >= 0) & (own < len(images.names))
            unit_names = table[np.where(inside, own, len(images.names))]
            unit_numbers = np.where(inside, UNLABELED, own)
        else:
            unit_names = np.full(len(own), -1, np.int64)
            unit_numbers = np.where(own == UNLABELED, UNLABELED, own - first)
        for image, value in _look_up(images, label_file) if label_file is not None else ():
            unit_names[image] = names.setdefault(value, len(names)) if isinstance(value, str) else -1
            unit_numbers[image] = value - first if isinstance(value, int) else UNLABELED
        named.append(unit_names)
        numbers.append(unit_numbers)
    empty = np.zeros(0, np.int64)
    return Labels(list(names), np.concatenate([empty, *named]), np.concatenate([empty, *numbers]))


def _look_up(images: UnitImages, label_file: dict[str, Class]) -> Iterator[tuple[int, Class]]:
    """The images that the file of labels lists: by path, file name or key, else by a folder, the innermost first."""
    paths, by_folder = list(images.shards), dict[str, Class | None]()
    for image, (key, shard) in enumerate(zip(images.keys, images.rows["shard"].tolist(), strict=True)):
        path = paths[shard]
        parent, _, name = path.rpartition("/")
        names = (path, path.rpartition(".")[0], name, key)
        value = next((label_file[name] for name in names if name in label_file), None)
        if value is None:
            if parent not in by_folder:
                by_folder[parent] = _class_of_folder(parent, label_file)
            value = by_folder[parent]
        if value is not None:
            yield image, value


def _class_of_folder(folder: str, label_file: dict[str, Class]) -> Class | None:
    while folder:
        parent, _, name = folder.rpartition("/")
        if folder in label_file or name in label_file:
            return label_file.get(folder, label_file.get(name))
        folder = parent
    return None


def class_names(
    labels: Labels, training: NDArray[np.bool_], stored: tuple[str, ...] | None, data: Files, first: int, folder: Path
) -> tuple[str, ...]:
    """The classes in order: as the format stores them, else the sorted names of training images, else numbers."""
    used = sorted({labels.names[index] for index in np.unique(labels.named[training]) if index >= 0})
    if stored is not None or used:
        names = stored if stored is not None else tuple(used)
        if data.classes is not None and len(names) > data.classes:
            raise DataError(f"{folder}: {len(names)} classes are here, but data.classes says {data.classes}")
        return names
    count = data.classes or (
        IMAGENET_CLASSES if data.name == "imagenet" else _count_classes(labels.numbers[training], folder)
    )
    return tuple(str(number + first) for number in range(count))


def _count_classes(numbers: Int64s, folder: Path) -> int:
    """How many classes there are when the largest label is the last one."""
    present = np.unique(numbers[numbers >= 0])
    if len(present) == 0:
        raise DataError(f"{folder}: no image has a label; write data.labels=FILE with lines of 'file,class'")
    count = int(present[-1]) + 1
    if count > 2 * len(present) + 10:
        # Labels far above the number of those that occur are taken for the mistake.
        plausible = present[present < 2 * len(present)]
        guess = int(plausible[-1]) + 1 if len(plausible) else len(present)
        raise DataError(
            f"{folder}: only {len(present)} of the labels up to {count - 1} occur, so one may be a mistake; "
            f"write data.classes={guess}, or whatever is right"
        )
    return count


def check_label_range(numbers: Int64s, classes: int, first: int, where: str, named: bool = False) -> None:
    """Refuse a label outside the classes that is too common to be a slip: then the settings are wrong."""
    outside = (numbers < 0) | (numbers >= classes)
    values, counts = np.unique(numbers[outside], return_counts=True)
    # A slip is rarer than a tenth of an average class.
    few = max(3.0, (len(numbers) - counts.sum()) / classes / 10)
    if len(values) == 0 or counts.max() < few:
        return
    value, count = int(values[counts.argmax()]), int(counts.max())
    if value == UNLABELED:
        raise DataError(f"{where}: {count:,} images have no label; write data.labels=FILE with lines of 'file,class'")
    more = "more data.class_names" if named else f"data.classes={value + 1}"
    remedy = f"data.first_label={value + first}" if value < 0 else more
    raise DataError(
        f"{where}: {count:,} images have label {value + first}, but classes go from {first} to {first + classes - 1}; "
        f"write {remedy}, or whatever is right"
    )
