"""Images as files of their own: class folders with or without splits, or one flat folder with a file of labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from paceline.data.index.formats import (
    IMAGE_ENDINGS,
    SPLIT_WORDS,
    UNLABELED,
    ScanUnit,
    SplitName,
    UnitImages,
    first_few,
    holds_shards,
    is_file,
    is_folder,
    visible_entries,
)
from paceline.data.index.image_header import read_header
from paceline.data.index.table import ROW, Flag
from paceline.errors import DataError
from paceline.files import disk_faults

KIND = "folder"
FIRST_LABEL = 0

_TRAINING, _VALIDATION = SPLIT_WORDS["training"], SPLIT_WORDS["validation"]

_TEXTS = ("", ".csv", ".json", ".txt", ".md", ".yaml", ".html", ".xml")
"""Files that may describe the images; beside class folders nobody misses them."""
_DEEPEST = 16
_CHUNK = 4096
_THREADS = 8


def recognize(folder: Path) -> bool:
    """Whether there are images in a training folder, in class folders, or right here."""
    training = _training_folder(folder, _folders(folder))
    if training is not None:
        return _has_images(folder / training, 3)
    return not holds_shards(folder) and _has_images(folder, 3)


def units(folder: Path, before: Mapping[str, ScanUnit]) -> list[ScanUnit]:
    """Every folder at any depth, of the training and validation folders or of the whole."""
    root = before.get("")
    unchanged = root is not None and root.stamp == _stamp(folder)
    subfolders = root.subfolders if root is not None and unchanged else _folders(folder)
    training = _training_folder(folder, subfolders)
    by_name = {name.lower(): name for name in subfolders}
    validation = next((by_name[name] for name in _VALIDATION if name in by_name), None)
    if training is None and validation is not None and by_name.keys() <= set(_VALIDATION):
        return list(_walk(folder, validation, "validation", before, 0))
    if training is None:
        everything = list(_walk(folder, "", "all", before, 0))
        _refuse_several(folder, everything)
        return everything
    trained = list(_walk(folder, training, "training", before, 0))
    return trained if validation is None else trained + list(_walk(folder, validation, "validation", before, 0))


def _refuse_several(folder: Path, units: Sequence[ScanUnit]) -> None:
    """Refuse "class folders" that have splits of their own: each of them is a data set, not a class."""
    splits = (set(_TRAINING), set(_VALIDATION))
    sets = [
        unit.name
        for unit in units
        if unit.name
        and "/" not in unit.name
        and all(words & {name.lower() for name in unit.subfolders} for words in splits)
    ]
    if sets:
        raise DataError(
            f"{folder}: each of these has training and validation images of its own: {first_few(sets)}; "
            f"write the one that is meant, such as --data {folder / sets[0]}"
        )


def _training_folder(folder: Path, subfolders: Sequence[str]) -> str | None:
    """The folder of training images; a 'train' among other classes, without folders in it, is a class of trains."""
    train = next((name for name in subfolders if name.lower() in _TRAINING), None)
    if train is None or len(subfolders) == 1 or any(name.lower() in _VALIDATION for name in subfolders):
        return train
    return train if _folders(folder / train) else None


def scan(folder: Path, unit: ScanUnit) -> UnitImages:
    """Find the images of one folder, not of those below it."""
    label_names = _class_of(unit)
    names, others = _files(folder / unit.name)
    skipped = others if label_names else Counter({end: others[end] for end in others if end not in _TEXTS})
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    rows = np.zeros(len(names), ROW)
    if len(chunks) > 1:
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(lambda chunk: _read_headers(folder / unit.name, chunk), chunks)
            columns = [row for chunk in read for row in chunk]
    else:
        columns = _read_headers(folder / unit.name, names)
    if names:
        rows["length"], rows["width"], rows["height"], rows["flags"] = np.array(columns, np.uint32).T
    rows["shard"] = np.arange(len(names))
    rows["label"] = 0 if label_names else UNLABELED
    start = f"{unit.name}/" if unit.name else ""
    keys = [name.rpartition(".")[0] for name in names]
    return UnitImages(rows, [start + name for name in names], keys, names=label_names, skipped=skipped)


def classes(_folder: Path) -> tuple[str, ...] | None:
    """None: the names of folders have no order of their own, so they are sorted."""
    return None


def notes(units: Sequence[ScanUnit], images: Sequence[UnitImages]) -> tuple[str, ...]:
    """Mention files that were skipped for their endings, and class folders without images."""
    endings, class_sizes = Counter[str](), Counter[str]()
    for unit, unit_images in zip(units, images, strict=True):
        endings.update(unit_images.skipped)
        if _class_of(unit):
            class_sizes["/".join(unit.name.split("/")[: 1 if unit.split == "all" else 2])] += len(unit_images.rows)
    ranked = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    by_ending = [f"{count:,} {ending or 'without ending'}" for ending, count in ranked]
    empty = [name for name, count in class_sizes.items() if not count]
    total = endings.total()
    return (
        *([f"{total:,} {'file was' if total == 1 else 'files were'} skipped: {first_few(by_ending)}"] if total else []),
        *(
            [f"{len(empty):,} {'folder has' if len(empty) == 1 else 'folders have'} no images: {first_few(empty)}"]
            if empty
            else []
        ),
    )


def _class_of(unit: ScanUnit) -> tuple[str, ...]:
    """The first folder inside the split is the class, however deep the image lies; images outside one have none."""
    folders = unit.name.split("/") if unit.name else []
    return tuple(folders[:1] if unit.split == "all" else folders[1:2])


def _stamp(folder: Path) -> tuple[int, int]:
    with disk_faults(DataError, folder, "cannot be read"):
        return 0, folder.stat().st_mtime_ns


def _folders(folder: Path) -> tuple[str, ...]:
    # A name that ends like an image is not asked whether it is a folder: there may be a million of them.
    return tuple(
        sorted(entry.name for entry in visible_entries(folder) if not _is_image(entry.name) and is_folder(entry))
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)


def _files(folder: Path) -> tuple[list[str], Counter[str]]:
    """The names of images, and how many other files there are of each ending."""
    images, others = [], Counter[str]()
    for entry in visible_entries(folder):
        if not is_file(entry):
            continue
        if _is_image(entry.name):
            images.append(entry.name)
        else:
            others[Path(entry.name).suffix.lower()] += 1
    return sorted(images), others


def _has_images(folder: Path, levels: int) -> bool:
    """Whether there is an image here, or in one of the first few folders below."""
    subfolders = []
    for entry in visible_entries(folder):
        if _is_image(entry.name):
            return True
        if is_folder(entry):
            subfolders.append(entry.name)
    return levels > 1 and any(_has_images(folder / name, levels - 1) for name in sorted(subfolders)[:32])


def _walk(folder: Path, name: str, split: SplitName, before: Mapping[str, ScanUnit], depth: int) -> Iterator[ScanUnit]:
    """A folder and every one below it; the subfolders of unchanged ones come from the last scan."""
    # The time is taken before the folder is listed: a change in between is then seen the next time.
    stamp = _stamp(folder / name)
    last = before.get(name)
    subfolders = last.subfolders if last is not None and last.stamp == stamp else _folders(folder / name)
    yield ScanUnit(name, split, stamp, subfolders)
    if depth == _DEEPEST and subfolders:
        raise DataError(f"{folder / name}: folders lie more than {_DEEPEST} deep here; does a link lead back up?")
    for child in subfolders:
        yield from _walk(folder, f"{name}/{child}" if name else child, split, before, depth + 1)


def _read_headers(folder: Path, names: list[str]) -> list[tuple[int, int, int, int]]:
    """Length, width, height and flags of each file."""
    columns = []
    for name in names:
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                length = os.fstat(descriptor).st_size
                # A file beyond 4 GiB is no image, and its length would not fit a row.
                header = read_header(descriptor, 0, length) if length < 1 << 32 else (0, 0, Flag.UNREADABLE)
            finally:
                os.close(descriptor)
        except OSError as fault:
            raise DataError(f"{folder / name}: cannot be read: {fault.strerror}") from None
        columns.append((length if length < 1 << 32 else 0, header[0], header[1], int(header[2])))
    return columns
