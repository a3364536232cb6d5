"""Puts what was found in every unit together: classes, splits, and one order for all formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.data.index.formats import UNLABELED, Format, Found, Unit, some_of
from paceline.data.index.formats.folder import KIND as FOLDER
from paceline.data.index.labels import Labels, check_strays, class_names, label_images, read_labels
from paceline.data.index.table import Flag, Index, Objects, Rows, Strings, Table
from paceline.errors import DataError
from paceline.settings.data import Files

Chosen = NDArray[np.bool_]

ALL = 1.0
"""The share `data.validation` of data that are only judged: their validation part, or all where there is none."""


@dataclass(frozen=True)
class _Pool:
    """All images, in the order of the units."""

    rows: Rows
    shards: list[str]
    keys: list[str]
    objects: Objects


def assemble(form: Format, data: Files, folder: Path, units: Sequence[Unit], founds: Sequence[Found]) -> Index:
    """The index of a data set, from everything that its units hold."""
    pool = _pool(founds)
    judged = np.repeat([unit.part == "validation" for unit in units], [len(found.rows) for found in founds])
    if judged.all() and data.validation != ALL:
        raise DataError(f"{folder}: there are no training images; add them in train/, or as train-*")
    first = form.FIRST_LABEL if data.first_label is None else data.first_label
    labels = label_images(founds, read_labels(data, folder), first)
    kept, notes = _without_strangers(form, labels, judged, folder, units)
    if data.validation == ALL and judged.any():
        kept, notes = kept & judged, (*notes, f"{folder}: its validation part is judged, and no other")
    # Classes are those of everything that may be trained on, so that a smaller share has the same numbers.
    own = form.classes(folder)
    names = data.class_names or class_names(labels, ~judged & kept, own, data, first, folder)
    final = _numbered(_by_name(labels, own) if data.class_names and own else labels, names, data, folder, pool, kept)
    for what, chosen in (("training", ~judged & kept), ("validation", judged & kept)):
        place = str(folder) if data.validation == ALL else f"{folder}: {what} part"
        check_strays(final[chosen], len(names), first, place, named=data.class_names is not None)
    pool.rows["label"] = final
    pool.rows["flags"] |= np.where((final < 0) | (final >= len(names)), int(Flag.OTHER_LABEL), 0).astype(np.uint16)
    training, validation = _parts(data, folder, pool, judged, kept)
    return Index(
        form.KIND, folder, names, _table(pool, training), _table(pool, validation), (*notes, *form.notes(units, founds))
    )


def _pool(founds: Sequence[Found]) -> _Pool:
    parts, shards, objects = [], 0, 0
    for found in founds:
        rows = found.rows.copy()
        rows["shard"] += shards
        rows["first_object"] += objects
        shards, objects = shards + len(found.shards), objects + len(found.objects)
        parts.append(rows)
    return _Pool(
        np.concatenate(parts),
        [name for found in founds for name in found.shards],
        [key for found in founds for key in found.keys],
        np.concatenate([found.objects for found in founds]),
    )


def _without_strangers(
    form: Format, labels: Labels, judged: Chosen, folder: Path, units: Sequence[Unit]
) -> tuple[Chosen, tuple[str, ...]]:
    """Among class folders, images that lie in none and have no label are none of the data set."""
    unknown = (labels.named < 0) & (labels.numbers == UNLABELED)
    if not labels.names or form.KIND != FOLDER:
        return np.ones(len(unknown), np.bool_), ()
    for what, part in (("training", ~judged), ("validation", judged)):
        if part.any() and unknown[part].all():
            remedy = "put them there, or write data.labels=FILE with lines of 'file,class'"
            if what == "validation":
                trained = folder / next(unit.name for unit in units if unit.part == "training")
                remedy += f", or leave them out: --data {trained} data.validation=10%"
            raise DataError(f"{folder}: the images of the {what} part lie in no class folders; {remedy}")
    count = int(unknown.sum())
    return ~unknown, (f"{count:,} images outside class folders are left out",) if count else ()


def _parts(data: Files, folder: Path, pool: _Pool, judged: Chosen, kept: Chosen) -> tuple[Chosen, Chosen]:
    """What is trained on and what is judged; shares are chosen by keys and labels alone, alike in every format.

    Each class gives its share, to the nearest image: to be judged at least one, where it has two, and never all of
    them; to be used at least one. A share of 0 of data that stay whole judges nothing.
    """
    if data.validation == ALL:
        return np.zeros_like(kept), kept
    if data.validation is None and not judged.any():
        raise DataError(
            f"{folder}: there are no validation images; add a validation part (val/ beside train/, or val-*), or write "
            f"data.validation=10% to judge a tenth of the images"
        )
    if data.validation is not None and judged.any():
        raise DataError(f"{folder}: the data have a validation part of their own; leave data.validation out")
    if data.validation:
        judged = _share(pool, kept, kept, "validation", data.validation, whole=False)
        if not judged.any():
            raise DataError(f"{folder}: no class has two images, so none can be put aside to be judged; add images")
    training, validation = ~judged & kept, judged & kept
    if data.fraction < 1:
        training = _share(pool, kept, training, "use", data.fraction, whole=True)
    return training, validation


def _share(pool: _Pool, kept: Chosen, among: Chosen, purpose: str, share: float, whole: bool) -> Chosen:
    """Of each class among these the share with the smallest chances, at least one, and all of them only if `whole`."""
    order = _ranked(pool, np.flatnonzero(kept))
    chances = _chances(pool, order, purpose)[among[order]]
    order = order[among[order]]
    # Labels outside the classes are one class more: which of them it is, not every format knows.
    outside = pool.rows["flags"][order] & int(Flag.OTHER_LABEL) > 0
    labels = np.where(outside, -1, pool.rows["label"][order])
    by_class = np.lexsort((chances, labels))
    _, firsts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    taken = np.minimum(np.maximum(np.rint(share * counts), 1), counts if whole else counts - 1)
    places = np.arange(len(by_class)) - np.repeat(firsts, counts)
    chosen = np.zeros(len(kept), np.bool_)
    chosen[order[by_class[places < np.repeat(taken, counts)]]] = True
    return chosen


def _chances(pool: _Pool, ranked: NDArray[np.int64], purpose: str) -> NDArray[np.float64]:
    """A number in [0, 1) for every image, by its key alone; further images with the same key have their own."""
    seen: dict[str, int] = {}
    chances = np.ones(len(ranked))
    for place, number in enumerate(ranked):
        key = pool.keys[number]
        before = seen.get(key, 0)
        seen[key] = before + 1
        text = key.encode("utf-8", "backslashreplace").decode()
        chances[place] = keyed.key(0, f"data.{purpose}", text, *([before] if before else [])) / 2.0**64
    return chances


def _by_name(labels: Labels, names: tuple[str, ...]) -> Labels:
    """The same with names where images have the numbers of classes whose names are known."""
    known = (labels.numbers >= 0) & (labels.numbers < len(names))
    named = np.where(known, labels.numbers + len(labels.names), labels.named)
    return Labels([*labels.names, *names], named, np.where(known, UNLABELED, labels.numbers))


def _numbered(
    labels: Labels, names: tuple[str, ...], data: Files, folder: Path, pool: _Pool, kept: Chosen
) -> NDArray[np.int64]:
    """Every image's class number; a class name that training does not have is a fault of the data."""
    numbers = {name: number for number, name in enumerate(names)}
    table = np.array([numbers.get(name, -1) for name in labels.names] + [UNLABELED], np.int64)
    final = np.where(labels.named >= 0, table[labels.named], labels.numbers)
    strange = kept & (labels.named >= 0) & (final < 0)
    if strange.any():
        where = int(strange.argmax())
        name = labels.names[int(labels.named[where])]
        shard = pool.shards[int(pool.rows["shard"][where])]
        if data.class_names:
            mended = "" if data.validation == ALL else ", or mend data.class_names"
            raise DataError(
                f"{folder / shard}: class '{name}' is none of {some_of(names)}; rename it, or remove it{mended}"
            )
        raise DataError(f"{folder / shard}: class '{name}' has no training images; remove it, or add it to training")
    return np.clip(final, UNLABELED, 2**31 - 1)


def _ranked(pool: _Pool, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of all formats: by key, then by label, then by where the image is."""
    keys = {key: rank for rank, key in enumerate(sorted({pool.keys[number] for number in numbers}))}
    by_key = np.fromiter((keys[pool.keys[number]] for number in numbers), np.int64, len(numbers))
    paths = np.argsort(np.argsort(np.array(pool.shards, object), kind="stable"))
    rows = pool.rows[numbers]
    return numbers[np.lexsort((rows["offset"], paths[rows["shard"]], rows["label"], by_key))]


def _table(pool: _Pool, chosen: Chosen) -> Table:
    """The rows of one split in their order, with the shards and objects that they speak of."""
    order = _ranked(pool, np.flatnonzero(chosen))
    rows = pool.rows[order]
    used = np.unique(rows["shard"])
    by_path = sorted(range(len(used)), key=lambda place: pool.shards[int(used[place])])
    renumbered = np.zeros(len(pool.shards), np.uint32)
    renumbered[used[by_path]] = np.arange(len(used), dtype=np.uint32)
    counts = rows["objects"].astype(np.int64)
    firsts = np.cumsum(counts) - counts
    source = np.repeat(rows["first_object"].astype(np.int64) - firsts, counts) + np.arange(counts.sum())
    rows["shard"], rows["first_object"] = renumbered[rows["shard"]], np.where(counts > 0, firsts, 0)
    return Table(
        rows,
        Strings.of(pool.shards[int(used[place])] for place in by_path),
        Strings.of(pool.keys[number] for number in order),
        pool.objects[source],
    )
