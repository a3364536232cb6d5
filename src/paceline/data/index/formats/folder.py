"""Images as files of their own: class folders with or without splits, or one flat folder with a file of labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.data.index.formats import (
    UNLABELED,
    ScanUnit,
    SplitName,
    UnitImages,
    counted,
    first_few,
    holds_shards,
    is_file,
    is_folder,
    visible_entries,
)
from paceline.data.index.formats.layout import find_splits, folders_in, hold_the_same, is_image, split_named
from paceline.data.index.image_header import HEIF_ENDINGS, read_header
from paceline.data.index.table import ROW, Flag
from paceline.errors import DataError
from paceline.files import disk_faults, read_whole

KIND = "folder"
FIRST_LABEL = 0

_TEXTS = ("", ".csv", ".json", ".txt", ".md", ".yaml", ".html", ".xml")
"""Files that may describe the images; beside class folders nobody misses them."""
_BROKEN = "broken link"
"""Stands for an ending where skipped files are counted."""
_DEEPEST = 16
_CHUNK = 4096
_THREADS = 8


def recognize(folder: Path) -> bool:
    """Whether there are images in a training folder, in class folders, or right here."""
    training = find_splits(folder, folders_in(folder)).training
    if training is not None:
        return _has_images(folder / training, 3)
    return not holds_shards(folder) and _has_images(folder, 3)


def units(folder: Path, before: Mapping[str, ScanUnit]) -> list[ScanUnit]:
    """Every folder at any depth, of the training and validation folders or of the whole."""
    root = before.get("")
    unchanged = root is not None and root.stamp == _stamp(folder)
    subfolders = root.subfolders if root is not None and unchanged else folders_in(folder)
    splits = find_splits(folder, subfolders).by_split()
    if splits:
        return [unit for split, name in splits for unit in _walk(folder, name, split, before, name.count("/") + 1)]
    everything = list(_walk(folder, "", "all", before, 0))
    _refuse_several(folder, everything)
    return everything


def _refuse_several(folder: Path, units: Sequence[ScanUnit]) -> None:
    """Refuse "class folders" that have splits of their own: each of them is a data set, not a class."""
    sets = [
        unit.name
        for unit in units
        if unit.name and "/" not in unit.name and {"training", "validation"} <= set(map(split_named, unit.subfolders))
    ]
    if sets:
        raise DataError(
            f"{folder}: each of these has training and validation images of its own: {first_few(sets)}; "
            f"write the one that is meant, such as --data {folder / sets[0]}"
        )


def refuse_unknown_splits(folder: Path, units: Sequence[ScanUnit], images: Sequence[UnitImages]) -> None:
    """Refuse two or three folders that hold nothing but folders of the same names: these are splits, not classes."""
    top = [
        (unit, len(one.rows))
        for unit, one in zip(units, images, strict=True)
        if unit.split == "all" and unit.name and "/" not in unit.name
    ]
    names = [unit.name for unit, _ in top]
    if len(top) > 3 or any(rows for _, rows in top) or not hold_the_same([unit.subfolders for unit, _ in top]):
        return
    raise DataError(
        f"{folder}: {' and '.join(names)} hold folders of the same names, {first_few(top[0][0].subfolders)}: splits, "
        f"not classes; rename them train and val, or, if they are the classes, write "
        f"data.class_names=[{', '.join(names)}]"
    )


def scan(folder: Path, unit: ScanUnit) -> UnitImages:
    """Find the images of one folder, not of those below it."""
    names, others = _files(folder / unit.name)
    label_names, labels = _labels_of(folder, unit, names)
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
    rows["label"] = labels
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
            class_sizes["/".join(unit.name.split("/")[: unit.depth + 1])] += len(unit_images.rows)
    ranked = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    by_ending = [
        counted(count, _BROKEN, f"{_BROKEN}s") if ending == _BROKEN else f"{count:,} {ending or 'without ending'}"
        for ending, count in ranked
    ]
    heif = "; write pip install pillow-heif to read .heic" if any(end in endings for end in HEIF_ENDINGS) else ""
    empty = [name for name, count in class_sizes.items() if not count]
    total = endings.total()
    return (
        *([f"{counted(total, 'file was', 'files were')} skipped: {first_few(by_ending)}{heif}"] if total else []),
        *([f"{counted(len(empty), 'folder has', 'folders have')} no images: {first_few(empty)}"] if empty else []),
    )


def _class_of(unit: ScanUnit) -> tuple[str, ...]:
    """The first folder inside the split is the class, however deep the image lies; images outside one have none."""
    folders = unit.name.split("/") if unit.name else []
    return tuple(folders[unit.depth : unit.depth + 1])


def _labels_of(folder: Path, unit: ScanUnit, names: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes of one folder's images, and for each image which of them it has."""
    if (annotations := _annotations(folder, unit)) is None:
        classes = _class_of(unit)
        return classes, [0 if classes else UNLABELED] * len(names)
    class_of = _read_annotations(annotations)
    classes = tuple(sorted({class_of[name] for name in names if name in class_of}))
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, [numbers[class_of[name]] if name in class_of else UNLABELED for name in names]


def _annotations(folder: Path, unit: ScanUnit) -> Path | None:
    """The file that gives the classes of a validation split, as Tiny-ImageNet has it: val/val_annotations.txt."""
    split = folder.joinpath(*unit.name.split("/")[: unit.depth])
    path = split / f"{split.name}_annotations.txt"
    return path if unit.split == "validation" and os.path.isfile(path) else None  # noqa: PTH113


def _read_annotations(path: Path) -> dict[str, str]:
    """The class of each file, from lines that begin with the two and tabs after them."""
    with disk_faults(DataError, path, "cannot be read"):
        text = read_whole(path).decode("utf-8", "replace")
    rows = [line.split("\t") for line in text.splitlines() if line.strip()]
    for number, cells in enumerate(rows, start=1):
        if len(cells) < 2:
            raise DataError(f"{path}:{number}: expected a file, a tab and its class, found '{cells[0][:80]}'")
    return {cells[0].strip(): cells[1].strip() for cells in rows}


def _stamp(folder: Path) -> tuple[int, int]:
    with disk_faults(DataError, folder, "cannot be read"):
        return 0, folder.stat().st_mtime_ns


def _files(folder: Path) -> tuple[list[str], Counter[str]]:
    """The names of images, and how many other files there are of each ending."""
    images, others = [], Counter[str]()
    for entry in visible_entries(folder):
        if not is_file(entry):
            others[_BROKEN] += int(not entry.is_dir() and entry.is_symlink())
        elif is_image(entry.name):
            images.append(entry.name)
        elif entry.name != f"{folder.name}_boxes.txt":  # which Tiny-ImageNet has in each class
            others[Path(entry.name).suffix.lower()] += 1
    return sorted(images), +others


def _has_images(folder: Path, levels: int, wanted: Callable[[str], bool] = is_image) -> bool:
    """Whether there is an image here, or in one of the first few folders below."""
    subfolders = []
    for entry in visible_entries(folder):
        if wanted(entry.name):
            return True
        if is_folder(entry):
            subfolders.append(entry.name)
    return levels > 1 and any(_has_images(folder / name, levels - 1, wanted) for name in sorted(subfolders)[:32])


def holds_ending(folder: Path, endings: tuple[str, ...]) -> bool:
    """Whether there is a file here, or in one of the first few folders below, whose name ends so."""
    return _has_images(folder, 3, lambda name: name.lower().endswith(endings))


def _walk(folder: Path, name: str, split: SplitName, before: Mapping[str, ScanUnit], depth: int) -> Iterator[ScanUnit]:
    """A folder and every one below it; the subfolders of unchanged ones come from the last scan."""
    # The time is taken before the folder is listed: a change in between is then seen the next time.
    stamp = _stamp(folder / name)
    last = before.get(name)
    subfolders = last.subfolders if last is not None and last.stamp[1] == stamp[1] else folders_in(folder / name)
    unit = ScanUnit(name, split, stamp, subfolders, depth)
    annotations = _annotations(folder, unit)
    yield unit if annotations is None else replace(unit, stamp=(annotations.stat().st_mtime_ns, stamp[1]))
    if len(Path(name).parts) - depth == _DEEPEST and subfolders:
        raise DataError(f"{folder / name}: folders lie more than {_DEEPEST} deep here; does a link lead back up?")
    for child in subfolders:
        yield from _walk(folder, f"{name}/{child}" if name else child, split, before, depth)


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
