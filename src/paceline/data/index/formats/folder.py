"""Images as files of their own: class folders with or without parts, or one flat folder with a file of labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from paceline.data.index.formats import (
    IMAGE_ENDINGS,
    UNLABELED,
    Found,
    Part,
    Unit,
    holds_shards,
    listed,
    some_of,
    table_rows,
)
from paceline.data.index.image_header import look_in
from paceline.data.index.table import Flag
from paceline.errors import DataError

KIND = "folder"
FIRST_LABEL = 0

_TRAINING = ("train", "training")
_VALIDATION = ("val", "valid", "validation", "eval", "test")
"""Of several, the first counts: the test part of many data sets has no labels."""

_TEXTS = ("", ".csv", ".json", ".txt", ".md", ".yaml", ".html", ".xml")
"""What may describe the images, and is not missed where it lies beside class folders."""
_DEEPEST = 16
_CHUNK = 4096
_THREADS = 8


def recognize(folder: Path) -> bool:
    """Whether there are images in a training part, in class folders, or right here."""
    training = _training_part(folder, _folders(folder))
    if training is not None:
        return _has_images(folder / training, 3)
    return not holds_shards(folder) and _has_images(folder, 3)


def units(folder: Path, known: Mapping[str, Unit]) -> list[Unit]:
    """Every folder at any depth, of the training and validation parts or of the whole."""
    here = known.get("")
    unchanged = here is not None and here.stamp == _stamp(folder)
    below = here.below if here is not None and unchanged else _folders(folder)
    training = _training_part(folder, below)
    by_name = {name.lower(): name for name in below}
    validation = next((by_name[name] for name in _VALIDATION if name in by_name), None)
    if training is None and validation is not None and by_name.keys() <= set(_VALIDATION):
        return list(_walk(folder, validation, "validation", known, 0))
    if training is None:
        whole = list(_walk(folder, "", "all", known, 0))
        _refuse_sets(folder, whole)
        return whole
    found = list(_walk(folder, training, "training", known, 0))
    return found if validation is None else found + list(_walk(folder, validation, "validation", known, 0))


def _refuse_sets(folder: Path, whole: Sequence[Unit]) -> None:
    """Refuse class folders that have parts: each of them is a data set, and not a class."""
    parts = (set(_TRAINING), set(_VALIDATION))
    sets = [
        unit.name
        for unit in whole
        if unit.name and "/" not in unit.name and all(part & {name.lower() for name in unit.below} for part in parts)
    ]
    if sets:
        raise DataError(
            f"{folder}: each of these has training and validation images of its own: {some_of(sets)}; "
            f"write the one that is meant, such as --data {folder / sets[0]}"
        )


def _training_part(folder: Path, below: Sequence[str]) -> str | None:
    """The folder of training images; one that is called so among others and holds no folders is a class of trains."""
    named = next((name for name in below if name.lower() in _TRAINING), None)
    if named is None or len(below) == 1 or any(name.lower() in _VALIDATION for name in below):
        return named
    return named if _folders(folder / named) else None


def scan(folder: Path, unit: Unit) -> Found:
    """The images of one folder, not of those below it."""
    named = _class_of(unit)
    names, others = _files(folder / unit.name)
    left_out = others if named else Counter({end: others[end] for end in others if end not in _TEXTS})
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    rows = table_rows(len(names))
    if len(chunks) > 1:
        with ThreadPoolExecutor(_THREADS) as pool:
            looked = [
                row for some in pool.map(lambda chunk: _look_at(folder / unit.name, chunk), chunks) for row in some
            ]
    else:
        looked = _look_at(folder / unit.name, names)
    if names:
        rows["length"], rows["width"], rows["height"], rows["flags"] = np.array(looked, np.uint32).T
    rows["shard"] = np.arange(len(names))
    rows["label"] = 0 if named else UNLABELED
    start = f"{unit.name}/" if unit.name else ""
    keys = [name.rpartition(".")[0] for name in names]
    return Found(rows, [start + name for name in names], keys, names=named, left_out=left_out)


def classes(folder: Path) -> tuple[str, ...] | None:
    """Folder names alone say no order; they are sorted."""
    del folder
    return None


def notes(units: Sequence[Unit], founds: Sequence[Found]) -> tuple[str, ...]:
    """What a person may miss: files that are no images by their endings, and class folders without images."""
    endings, images = Counter[str](), Counter[str]()
    for unit, found in zip(units, founds, strict=True):
        endings.update(found.left_out)
        if _class_of(unit):
            images["/".join(unit.name.split("/")[: 1 if unit.part == "all" else 2])] += len(found.rows)
    ranked = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    said = [f"{count:,} {ending or 'without ending'}" for ending, count in ranked]
    empty = [name for name, count in images.items() if not count]
    total = endings.total()
    return (
        *([f"{total:,} {'file was' if total == 1 else 'files were'} left out: {some_of(said)}"] if said else []),
        *(
            [f"{len(empty):,} {'folder has' if len(empty) == 1 else 'folders have'} no images: {some_of(empty)}"]
            if empty
            else []
        ),
    )


def _class_of(unit: Unit) -> tuple[str, ...]:
    """The first folder below the part is the class, however deep the image is; images right in a part have none."""
    inside = unit.name.split("/") if unit.name else []
    return tuple(inside[:1] if unit.part == "all" else inside[1:2])


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        return 0, folder.stat().st_mtime_ns
    except OSError as fault:
        raise DataError(f"{folder}: cannot be read: {fault.strerror}") from None


def _folders(folder: Path) -> tuple[str, ...]:
    # A name that ends like an image is not asked again, for a million files are.
    return tuple(sorted(entry.name for entry in listed(folder) if not _is_image(entry.name) and entry.is_dir()))


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)


def _files(folder: Path) -> tuple[list[str], Counter[str]]:
    """The names of images, and how many other files there are of each ending."""
    images, others = [], Counter[str]()
    for entry in listed(folder):
        if not entry.is_file():
            continue
        if _is_image(entry.name):
            images.append(entry.name)
        else:
            others[Path(entry.name).suffix.lower()] += 1
    return sorted(images), others


def _has_images(folder: Path, deep: int) -> bool:
    """Whether there is an image here, or in one of the first few folders below."""
    below = []
    for entry in listed(folder):
        if _is_image(entry.name):
            return True
        if entry.is_dir():
            below.append(entry.name)
    return deep > 1 and any(_has_images(folder / name, deep - 1) for name in sorted(below)[:32])


def _walk(folder: Path, name: str, part: Part, known: Mapping[str, Unit], deep: int) -> Iterator[Unit]:
    # The time is taken before the folder is listed: a change in between is then seen the next time.
    stamp = _stamp(folder / name)
    before = known.get(name)
    below = before.below if before is not None and before.stamp == stamp else _folders(folder / name)
    yield Unit(name, part, stamp, below)
    if deep == _DEEPEST and below:
        raise DataError(f"{folder / name}: folders lie more than {_DEEPEST} deep here; does a link lead back up?")
    for child in below:
        yield from _walk(folder, f"{name}/{child}" if name else child, part, known, deep + 1)


def _look_at(folder: Path, names: list[str]) -> list[tuple[int, int, int, int]]:
    """Length, width, height and flags of each file."""
    found = []
    for name in names:
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                length = os.fstat(descriptor).st_size
                # A file beyond 4 GiB is no image, and its length would not fit.
                seen = look_in(descriptor, 0, length) if length < 1 << 32 else (0, 0, Flag.UNREADABLE)
            finally:
                os.close(descriptor)
        except OSError as fault:
            raise DataError(f"{folder / name}: cannot be read: {fault.strerror}") from None
        found.append((length if length < 1 << 32 else 0, seen[0], seen[1], int(seen[2])))
    return found
