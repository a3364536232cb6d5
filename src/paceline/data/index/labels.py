"""Finds the class of every image: from its folder, from the number in its file, or from a file of labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.formats import UNLABELED, UnitImages, counted, first_few
from paceline.data.index.formats.layout import is_plain
from paceline.data.index.label_file import LabelFile, LabelSplit
from paceline.errors import DataError
from paceline.numpy_types import Int64s
from paceline.settings.data import Files

IMAGENET_CLASSES = 1000

_SPLIT_CODES: dict[LabelSplit, int] = {"training": 0, "validation": 1, "test": 2}
_NO_SPLIT = -1


@dataclass
class Labels:
    """The class of every image, by name or by number; where one is known, the other is -1 (named) or UNLABELED."""

    names: list[str]
    """The class names that occur, in the order of their first image."""
    named: Int64s
    """For each image an index into names."""
    numbers: Int64s
    """For each image its class number, counted from 0."""
    splits: Int64s
    """For each image the number of the split that the file of labels says it is in, or -1."""
    left_out: NDArray[np.bool_]
    """Images that data.relabel gives no class."""
    notes: tuple[str, ...] = ()

    def is_in(self, split: LabelSplit) -> NDArray[np.bool_]:
        """The images that the file of labels says are in a split."""
        return np.equal(self.splits, _SPLIT_CODES[split])


def label_images(by_unit: Sequence[UnitImages], first: int) -> Labels:
    """The class of every image in turn, as the image files and their folders say."""
    names: dict[str, int] = {}
    empty = np.zeros(0, np.int64)
    named, numbers = [empty], [empty]
    for images in by_unit:
        own = images.rows["label"].astype(np.int64)
        if images.names:
            # Labels count into the names of the unit; labels outside of them pick the extra last entry, -1.
            table = np.array([names.setdefault(name, len(names)) for name in images.names] + [-1], np.int64)
            inside = (own >= 0) & (own < len(images.names))
            named.append(table[np.where(inside, own, len(images.names))])
            numbers.append(np.where(inside, UNLABELED, own))
        else:
            named.append(np.full(len(own), -1, np.int64))
            numbers.append(np.where(own == UNLABELED, UNLABELED, own - first))
    count = sum(map(len, named))
    splits, left_out = np.full(count, _NO_SPLIT, np.int64), np.zeros(count, np.bool_)
    return Labels(list(names), np.concatenate(named), np.concatenate(numbers), splits, left_out)


def apply_label_file(labels: Labels, by_unit: Sequence[UnitImages], file: LabelFile, first: int) -> Labels:
    """The labels with those of a file over them, and the splits that it names."""
    names = {name: number for number, name in enumerate(labels.names)}
    keys, used = _aligned(by_unit, file.classes), set[str]()
    by_folder, listed = labels.named.copy(), np.zeros(len(labels.named), np.bool_)
    for image, match, alone in _matches(by_unit, keys):
        key = keys[match]
        used.add(key)
        listed[image] = alone
        value = file.classes[key]
        labels.named[image] = names.setdefault(value, len(names)) if isinstance(value, str) else -1
        labels.numbers[image] = value - first if isinstance(value, int) else UNLABELED
        if key in file.splits:
            labels.splits[image] = _SPLIT_CODES[file.splits[key]]
    if not used:
        here = next((path for images in by_unit for path in images.shards), "")
        raise DataError(
            f"{file.name}: it lists {counted(len(file.classes), 'file', 'files')}, such as "
            f"'{next(iter(file.classes))}', and none is here; the images are such as '{here}'"
        )
    unchanged = (labels.named == by_folder) & ~listed
    labels.named[unchanged & _in_no_class(labels.names, by_folder, listed, {*file.classes.values()})] = -1
    unused = [key for key in file.classes if key not in used]
    note = f"{counted(len(unused), 'label has', 'labels have')} no image: {first_few(unused)}"
    return replace(labels, names=list(names), notes=(*labels.notes, *([note] if unused else [])))


def _in_no_class(
    folders: Sequence[str], by_folder: Int64s, listed: NDArray[np.bool_], classes: set[str | int]
) -> NDArray[np.bool_]:
    """The images whose folder is no class: its files are listed one by one, or it is only called 'images'."""
    sizes, listed_sizes = (
        np.bincount(each[each >= 0], minlength=len(folders)) for each in (by_folder, by_folder[listed])
    )
    plain = np.array([is_plain(name) for name in folders], np.bool_) & (listed_sizes > 0)
    no_class = (plain | (2 * listed_sizes >= np.maximum(sizes, 1))) & ~np.isin(folders, [*map(str, classes)])
    in_no_class: NDArray[np.bool_] = (by_folder >= 0) & np.append(no_class, False)[by_folder]
    return in_no_class


def apply_relabels(labels: Labels, by_unit: Sequence[UnitImages], relabels: Mapping[str, str], first: int) -> Labels:
    """The labels with corrected ones over them; an image that gets no class is left out."""
    names = {name: number for number, name in enumerate(labels.names)}
    by_number = not (labels.named >= 0).any() and all(
        re.fullmatch("-?[0-9]{0,9}", value) for value in relabels.values()
    )
    keys, used, changed = _aligned(by_unit, relabels), set[str](), 0
    for image, match, _ in _matches(by_unit, keys):
        used.add(keys[match])
        value = relabels[keys[match]]
        if not value:
            labels.left_out[image] = True
            continue
        named = -1 if by_number else names.setdefault(value, len(names))
        number = int(value) - first if by_number else UNLABELED
        changed += int((labels.named[image], labels.numbers[image]) != (named, number))
        labels.named[image], labels.numbers[image] = named, number
    unused = [key for key in relabels if key not in used]
    left_out = int(labels.left_out.sum())
    note = (
        f"data.relabel changes {counted(changed, 'label', 'labels')}, leaves out {counted(left_out, 'image', 'images')}"
    )
    lost = f"{counted(len(unused), 'line', 'lines')} of data.relabel found no image: {first_few(unused)}"
    return replace(labels, names=list(names), notes=(*labels.notes, note, *([lost] if unused else [])))


def _matches(by_unit: Sequence[UnitImages], keys: Mapping[str, str]) -> Iterator[tuple[int, str, bool]]:
    """The images that are listed, alone by path, file name or key, else by a folder, the innermost first."""
    image = 0
    by_folder = dict[str, str | None]()
    for images in by_unit:
        paths = list(images.shards)
        for key, shard in zip(images.keys, images.rows["shard"].tolist(), strict=True):
            path = paths[shard]
            parent, _, name = path.rpartition("/")
            match = next((each for each in (path, path.rpartition(".")[0], name, key) if each in keys), None)
            alone = match is not None
            if match is None:
                if parent not in by_folder:
                    by_folder[parent] = _listed_folder(parent, keys)
                match = by_folder[parent]
            if match is not None:
                yield image, match, alone
            image += 1


def _listed_folder(folder: str, keys: Mapping[str, str]) -> str | None:
    while folder:
        parent, _, name = folder.rpartition("/")
        if folder in keys or name in keys:
            return folder if folder in keys else name
        folder = parent
    return None


def _aligned(by_unit: Sequence[UnitImages], listed: Iterable[str]) -> dict[str, str]:
    """What a file lists, by how the index would call it: where nothing fits, the paths may begin at other roots.

    Then as many leading folders are dropped from each as it takes, and as a last resort its file name decides.
    """
    keys = {key: key for key in listed}
    if next(_matches(by_unit, keys), None) is not None:
        return keys
    paths = [path for images in by_unit for path in images.shards]
    known = {*paths, *(path.rpartition(".")[0] for path in paths)}
    names = Counter(path.rpartition("/")[2] for path in paths)
    aligned: dict[str, str] = {}
    for key in keys:
        parts = key.split("/")
        ends = ("/".join(parts[dropped:]) for dropped in range(1, len(parts)))
        end = next((end for end in ends if end in known), parts[-1] if names[parts[-1]] == 1 else None)
        if end is not None and aligned.setdefault(end, key) != key:
            raise DataError(
                f"'{aligned[end]}' and '{key}' of the file of labels are both '{end}' here; keep one of them"
            )
    return aligned


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
        without = counted(count, "image has", "images have")
        raise DataError(f"{where}: {without} no label; write data.labels=FILE with lines of 'file,class'")
    more = "more data.class_names" if named else f"data.classes={value + 1}"
    remedy = f"data.first_label={value + first}" if value < 0 else more
    have = counted(count, "image has", "images have")
    raise DataError(
        f"{where}: {have} label {value + first}, but classes go from {first} to {first + classes - 1}; "
        f"write {remedy}, or whatever is right"
    )
