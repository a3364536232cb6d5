"""Puts the images of all scan units together: class numbers, splits, and one order for all formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.data.index.formats import UNLABELED, Format, ScanUnit, UnitImages, counted, first_few
from paceline.data.index.formats.folder import KIND as FOLDER
from paceline.data.index.formats.folder import refuse_unknown_splits
from paceline.data.index.label_file import LabelFile, read_labels, read_relabels
from paceline.data.index.labels import (
    Labels,
    apply_label_file,
    apply_relabels,
    check_label_range,
    class_names,
    label_images,
)
from paceline.data.index.table import Flag, Index, Objects, Rows, Strings, Table
from paceline.errors import DataError
from paceline.settings.data import Files
from paceline.visible import plural

Mask = NDArray[np.bool_]


class EvaluationFiles(Files):
    """Images that are only evaluated: the validation split of a folder, or everything in it where there is none."""


@dataclass(frozen=True)
class _Images:
    """All images, in the order of the scan units."""

    rows: Rows
    shards: list[str]
    keys: list[str]
    objects: Objects


def assemble_index(
    form: Format, data: Files, folder: Path, units: Sequence[ScanUnit], by_unit: Sequence[UnitImages], whole: bool
) -> Index:
    """Build an index from the images of all units; `whole` keeps data without a validation split in one piece."""
    images = _concatenate(by_unit)
    evaluate_only = isinstance(data, EvaluationFiles)
    validation = np.repeat([unit.split == "validation" for unit in units], [len(one.rows) for one in by_unit])
    if validation.all() and not evaluate_only:
        raise DataError(f"{folder}: there are no training images; add them in train/, or as train-*")
    first = form.FIRST_LABEL if data.first_label is None else data.first_label
    label_file = read_labels(data, folder)
    if form.KIND == FOLDER and label_file is None and not data.class_names:
        refuse_unknown_splits(folder, units, by_unit)
    labels = label_images(by_unit, first)
    if label_file is not None:
        labels = apply_label_file(labels, by_unit, label_file, first)
        validation = (validation & ~labels.is_in("training")) | labels.is_in("validation")
    if (relabels := read_relabels(data, folder)) is not None:
        labels = apply_relabels(labels, by_unit, relabels, first)
    labeled, notes = _exclude_unlabeled(form, labels, validation, folder, units, label_file)
    validation &= labeled
    if evaluate_only and validation.any():
        labeled, notes = labeled & validation, (*notes, f"{folder}: only its validation split is evaluated")
    # Classes are those of all images that could be trained on, so that a smaller data.fraction has the same numbers.
    stored_names = form.classes(folder)
    names = data.class_names or class_names(labels, ~validation & labeled, stored_names, data, first, folder)
    if data.class_names and stored_names:
        labels = _by_name(labels, stored_names)
    numbers = _class_numbers(labels, names, data, folder, images, labeled)
    for split, mask in (("training", ~validation & labeled), ("validation", validation & labeled)):
        where = str(folder) if evaluate_only else f"{folder}: {split} split"
        check_label_range(numbers[mask], len(names), first, where, named=data.class_names is not None)
    images.rows["label"] = numbers
    outside = (numbers < 0) | (numbers >= len(names))
    images.rows["flags"] |= np.where(outside, int(Flag.OTHER_LABEL), 0).astype(np.uint16)
    training, validation = _split_masks(data, folder, images, validation, labeled, whole)
    tables = _table(images, training), _table(images, validation)
    return Index(form.KIND, folder, names, *tables, (*notes, *form.notes(units, by_unit)))


def _concatenate(by_unit: Sequence[UnitImages]) -> _Images:
    all_rows, shards, objects = [], 0, 0
    for unit_images in by_unit:
        rows = unit_images.rows.copy()
        # Rows count into the shards and objects of their unit; in the concatenation those of earlier units come first.
        rows["shard"] += shards
        rows["first_object"] += objects
        shards, objects = shards + len(unit_images.shards), objects + len(unit_images.objects)
        all_rows.append(rows)
    return _Images(
        np.concatenate(all_rows),
        [name for unit_images in by_unit for name in unit_images.shards],
        [key for unit_images in by_unit for key in unit_images.keys],
        np.concatenate([unit_images.objects for unit_images in by_unit]),
    )


def _exclude_unlabeled(
    form: Format,
    labels: Labels,
    validation: Mask,
    folder: Path,
    units: Sequence[ScanUnit],
    label_file: LabelFile | None,
) -> tuple[Mask, tuple[str, ...]]:
    """Among class folders, images that lie in none and have no label do not belong to the data set."""
    unlabeled = (labels.named < 0) & (labels.numbers == UNLABELED)
    chosen = ~labels.left_out & ~labels.is_in("test")
    tests = int(labels.is_in("test").sum())
    notes = [
        *labels.notes,
        *(
            [f"{counted(tests, 'image of the test split is', 'images of the test split are')} left out"]
            if tests
            else []
        ),
    ]
    listed = label_file is not None
    if form.KIND != FOLDER or not (labels.names or (listed and unlabeled[validation].all())):
        return chosen, tuple(notes)
    unlabeled &= np.bool_(bool(labels.names)) | validation
    for split, mask in (("training", ~validation), ("validation", validation)):
        # Where labels come in a file, a test split without any is nothing to wonder about.
        if mask.any() and unlabeled[mask].all() and not (listed and split == "validation"):
            remedy = "put them there, or write data.labels=FILE with lines of 'file,class'"
            if split == "validation":
                trained = folder / next(unit.name for unit in units if unit.split == "training")
                remedy += f", or leave them out: --data {trained} data.validation=10%"
            raise DataError(f"{folder}: the {split} images lie in no class folders; {remedy}")
    count = int((unlabeled & chosen).sum())
    where = f"not in {label_file.name}" if label_file is not None else "outside class folders"
    if count:
        notes.append(f"{plural(count, 'image')} {where} {'is' if count == 1 else 'are'} skipped")
    return ~unlabeled & chosen, tuple(notes)


def _split_masks(
    data: Files, folder: Path, images: _Images, validation: Mask, labeled: Mask, whole: bool
) -> tuple[Mask, Mask]:
    """Which images are trained on and which are validated; the choice depends on keys and labels alone, in any format.

    Each class gives its fraction, to the nearest image: for validation at least one where it has two, and never all;
    for data.fraction at least one.
    """
    if isinstance(data, EvaluationFiles):
        return np.zeros_like(labeled), labeled
    if data.validation is None and not validation.any() and not whole:
        raise DataError(
            f"{folder}: there are no validation images; add a validation split (val/ beside train/, or val-*), or "
            f"write data.validation=10% to validate on a tenth of the images, or data.validation=0 "
            f"evaluate.every=never to validate on none"
        )
    if data.validation is not None and validation.any():
        raise DataError(f"{folder}: the data have a validation split of their own; leave data.validation out")
    if data.validation:
        validation = _sample_classes(images, labeled, labeled, "validation", data.validation, leave_one=True)
        if not validation.any():
            raise DataError(
                f"{folder}: no class has two images, so none can be set aside for validation; add images, or write "
                "data.validation=0 evaluate.every=never"
            )
    training, validation = ~validation & labeled, validation & labeled
    if data.fraction < 1:
        training = _sample_classes(images, labeled, training, "use", data.fraction, leave_one=False)
    return training, validation


def _sample_classes(
    images: _Images, labeled: Mask, candidates: Mask, purpose: str, fraction: float, leave_one: bool
) -> Mask:
    """Choose a fraction of each class, at least one image of it, and where `leave_one` says so never all of them."""
    # Every labeled image has its number before the candidates are picked out, so that it does not depend on them.
    order = _sorted(images, np.flatnonzero(labeled))
    draws = _draws(images, order, purpose)[candidates[order]]
    order = order[candidates[order]]
    # Labels outside the classes count as one more class, since not every format can tell them apart.
    outside = images.rows["flags"][order] & int(Flag.OTHER_LABEL) > 0
    labels = np.where(outside, -1, images.rows["label"][order])
    # Sorted by class, and inside a class by draw: the first images of each class are the chosen ones.
    by_class = np.lexsort((draws, labels))
    _, firsts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    chosen_counts = np.minimum(np.maximum(np.rint(fraction * counts), 1), counts - 1 if leave_one else counts)
    rank_in_class = np.arange(len(by_class)) - np.repeat(firsts, counts)
    chosen = np.zeros(len(labeled), np.bool_)
    chosen[order[by_class[rank_in_class < np.repeat(chosen_counts, counts)]]] = True
    return chosen


def _draws(images: _Images, order: NDArray[np.int64], purpose: str) -> NDArray[np.float64]:
    """A number in [0, 1) for every image, keyed by its name alone; further images of the same name have their own."""
    seen: dict[str, int] = {}
    draws = np.ones(len(order))
    for position, image in enumerate(order):
        key = images.keys[image]
        before = seen.get(key, 0)
        seen[key] = before + 1
        text = key.encode("utf-8", "backslashreplace").decode()
        draws[position] = keyed.key(0, f"data.{purpose}", text, *([before] if before else [])) / 2.0**64
    return draws


def _by_name(labels: Labels, names: tuple[str, ...]) -> Labels:
    """Give names to images that are labeled by the numbers of classes whose names the format stores."""
    nameable = (labels.numbers >= 0) & (labels.numbers < len(names))
    # The stored names are appended to the list, so number n becomes the name at len(labels.names) + n.
    named = np.where(nameable, labels.numbers + len(labels.names), labels.named)
    numbers = np.where(nameable, UNLABELED, labels.numbers)
    return replace(labels, names=[*labels.names, *names], named=named, numbers=numbers)


def _class_numbers(
    labels: Labels, names: tuple[str, ...], data: Files, folder: Path, images: _Images, labeled: Mask
) -> NDArray[np.int64]:
    """The class number of every image; a class name without training images is a fault of the data."""
    number_of = {name: number for number, name in enumerate(names)}
    # Images without a name have -1 in labels.named, which picks the extra last entry; np.where then ignores it.
    table = np.array([number_of.get(name, -1) for name in labels.names] + [UNLABELED], np.int64)
    numbers = np.where(labels.named >= 0, table[labels.named], labels.numbers)
    unknown = labeled & (labels.named >= 0) & (numbers < 0)
    if unknown.any():
        image = int(unknown.argmax())
        name = labels.names[int(labels.named[image])]
        path = folder / images.shards[int(images.rows["shard"][image])]
        if data.class_names:
            other = "" if isinstance(data, EvaluationFiles) else ", or correct data.class_names"
            raise DataError(f"{path}: class '{name}' is not one of {first_few(names)}; rename or remove it{other}")
        alike = next((other for other in names if other.lower() == name.lower()), None)
        meant = f"; did you mean '{alike}'?" if alike else "; remove it, or add it to training"
        raise DataError(f"{path}: class '{name}' has no training images{meant}")
    return np.clip(numbers, UNLABELED, 2**31 - 1)


def _sorted(images: _Images, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort images as every format sorts them: by key, then by label, then by path and offset."""
    keys = {key: rank for rank, key in enumerate(sorted({images.keys[index] for index in indices}))}
    by_key = np.fromiter((keys[images.keys[index]] for index in indices), np.int64, len(indices))
    path_ranks = np.argsort(np.argsort(np.array(images.shards, object), kind="stable"))  # sorting twice gives ranks
    rows = images.rows[indices]
    # lexsort takes the most important key last.
    return indices[np.lexsort((rows["offset"], path_ranks[rows["shard"]], rows["label"], by_key))]


def _table(images: _Images, mask: Mask) -> Table:
    """The sorted rows of one split, with only the shards and objects that they refer to."""
    order = _sorted(images, np.flatnonzero(mask))
    rows = images.rows[order]
    used = np.unique(rows["shard"])
    by_path = sorted(range(len(used)), key=lambda index: images.shards[int(used[index])])
    new_shards = np.zeros(len(images.shards), np.uint32)
    new_shards[used[by_path]] = np.arange(len(used), dtype=np.uint32)
    # The objects of the rows are packed in the order of the rows: row i takes counts[i] objects from its old first one
    # on, and its new first one is the sum of the counts before it.
    counts = rows["objects"].astype(np.int64)
    firsts = np.cumsum(counts) - counts
    source = np.repeat(rows["first_object"].astype(np.int64) - firsts, counts) + np.arange(counts.sum())
    rows["shard"], rows["first_object"] = new_shards[rows["shard"]], np.where(counts > 0, firsts, 0)
    return Table(
        rows,
        Strings.of(images.shards[int(used[index])] for index in by_path),
        Strings.of(images.keys[index] for index in order),
        images.objects[source],
    )
