"""Writes any data set as WebDataset tars or as files in class folders, for other programs to read."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import keyed
from paceline.data.index.formats import SPLIT_WORDS, first_few
from paceline.data.index.formats.webdataset import TRUE_KEY
from paceline.data.index.table import Flag, Index, Table
from paceline.data.pack import tiles
from paceline.data.pack.transcode import read_encoded
from paceline.data.pack.writer import splits_to_write
from paceline.errors import DataError
from paceline.files import disk_faults, new_file, write_whole
from paceline.progress import Progress, silent

_TARS = {"training": "train", "validation": "validation", "all": "all"}
_FOLDERS = {"training": "train", "validation": "val", "all": ""}
_ENDINGS = ((b"\x89PNG", "png"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))


@dataclass(frozen=True)
class _NamedImage:
    """An image to write."""

    index: int
    name: str
    """Its class folder and key, made unique in its split."""
    label: int
    encoded: bytes


def to_webdataset(
    index: Index, out: Path, samples: int = 1024, shuffle: int | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """Write tars of so many samples each, in the order of keys or shuffled by a seed; returns their metadata."""
    _make_empty(out)
    class_folders = _class_folders(index.classes)
    metadata: dict[str, Any] = {"format": "webdataset", "classes": [*index.classes], "samples per shard": samples}
    metadata |= {"shuffle": shuffle, "splits": {}}
    for split, table in splits_to_write(index):
        order = np.arange(len(table))
        if shuffle is not None:
            order = keyed.permutation(keyed.key(shuffle, "convert", split), len(table))
        images = _images(index.folder, table, class_folders, progress, split, order.tolist(), dots=False)
        shards = 0
        for shards, start in enumerate(range(0, len(table), samples), start=1):
            path = out / f"{_TARS[split]}-{shards - 1:06}.tar"
            with new_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for _ in range(min(samples, len(table) - start)):
                    _add_sample(tar, next(images), table)
        metadata["splits"][_TARS[split]] = {"samples": len(table), "shards": shards}
    write_whole(out / "metadata.json", json.dumps(metadata, indent=1) + "\n")
    return metadata


def _add_sample(tar: tarfile.TarFile, image: _NamedImage, table: Table) -> None:
    """Add the image, its label as text, and whatever else there is as JSON: objects, and a key that has dots."""
    ending = "png" if image.encoded.startswith(b"\x89PNG") else "jpg"  # readers know these two
    members = {ending: image.encoded, "cls": str(image.label).encode()}
    fields: dict[str, Any] = {}
    if table.rows["objects"][image.index]:
        fields["bbox"] = table.objects_of(image.index).tolist()
    if (key := table.keys[image.index]) != image.name.rpartition("/")[2]:
        fields[TRUE_KEY] = key
    if fields:
        members["json"] = json.dumps({"label": image.label, **fields}).encode()
    for name, content in members.items():
        header = tarfile.TarInfo(f"{image.name}.{name}")
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))


def to_folder(index: Index, out: Path, progress: Progress = silent) -> dict[str, Any]:
    """Write files in class folders, below train/ and val/ where there are two splits; returns how many."""
    _refuse_empty_classes(index)
    _make_empty(out)
    class_folders = _class_folders(index.classes)
    counts: dict[str, Any] = {"format": "folder", "classes": class_folders, "splits": {}, "without a class": 0}
    for split, table in splits_to_write(index):
        for class_folder in class_folders:
            (out / _FOLDERS[split] / class_folder).mkdir(parents=True)
        with_class = np.flatnonzero((table.rows["flags"] & int(Flag.OTHER_LABEL)) == 0).tolist()
        for image in _images(index.folder, table, class_folders, progress, split, with_class, dots=True):
            (out / _FOLDERS[split] / f"{image.name}.{_ending(image.encoded)}").write_bytes(image.encoded)
        counts["splits"][_FOLDERS[split] or "all"] = len(with_class)
        counts["without a class"] += len(table) - len(with_class)
    return counts


def _images(
    folder: Path, table: Table, class_folders: list[str], progress: Progress, split: str, order: list[int],
    dots: bool,
) -> Iterator[_NamedImage]:  # fmt: skip
    """The images in this order, each with a unique name; without `dots`, for readers to whom a dot ends the key."""
    used: set[str] = set()
    for done, index in enumerate(order, start=1):
        row = table.rows[index]
        label = int(row["label"])
        key = table.keys[index] if dots else table.keys[index].replace(".", "_")
        name = start = f"{class_folders[label] if 0 <= label < len(class_folders) else 'other'}/{key}"
        copy = 1
        while name in used:
            copy += 1
            name = f"{start}-{copy}"
        used.add(name)
        path, offset, length = table.span(index)
        encoded = read_encoded(folder / path, offset, length)
        if int(row["flags"]) & Flag.TILED:
            encoded = tiles.remove_tile_lengths(encoded)
        yield _NamedImage(index, name, label, encoded)
        progress(f"writing {split}", done, len(order))


def _ending(encoded: bytes) -> str:
    """The ending that fits the content, whatever the file was called."""
    return next((ending for start, ending in _ENDINGS if encoded.startswith(start)), "jpg")


def _class_folders(classes: tuple[str, ...]) -> list[str]:
    """A folder name for each class, such that sorting the names keeps the numbers of the classes."""
    if all(name.isdecimal() for name in classes):
        width = max(map(len, classes), default=1)
        padded = [name.zfill(width) for name in classes]
        if padded == sorted(set(padded)):
            return padded
    splits = {word for words in SPLIT_WORDS.values() for word in words}  # a folder called so would be no class
    ordinary = all(re.fullmatch(r"\w[\w ,.()'-]*", name) and name.lower() not in splits for name in classes)
    if ordinary and list(classes) == sorted(set(classes)):
        return list(classes)
    width = len(str(len(classes)))
    plain = [re.sub(r"[^\w-]+", "_", name)[:80] for name in classes]
    return [f"{number:0{width}}-{name}".rstrip("-") for number, name in enumerate(plain)]


def _refuse_empty_classes(index: Index) -> None:
    """A folder without training images is no class to any reader, and later classes would get other numbers."""
    trained = set(index.training.rows["label"].tolist())
    empty = [name for number, name in enumerate(index.classes) if number not in trained]
    if empty:
        raise DataError(
            f"{index.folder}: {len(empty):,} of {len(index.classes):,} classes have no training images: "
            f"{first_few(empty)}; as folders the others would get other numbers; write --to webdataset, which keeps "
            "them"
        )


def _make_empty(out: Path) -> None:
    """Create the folder to write into; nothing else may be in it."""
    with disk_faults(DataError, out, "cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise DataError(f"{out}: this folder is not empty; write a new folder")
