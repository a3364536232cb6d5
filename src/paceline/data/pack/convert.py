"""Any data set as WebDataset tars or as files in class folders, for the rest of the world to read."""

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
from paceline.data.index.formats import some_of
from paceline.data.index.formats.webdataset import TRUE_KEY
from paceline.data.index.table import Flag, Index, Table
from paceline.data.pack import tiles
from paceline.data.pack.shards import Tell
from paceline.data.pack.transcode import read_bytes
from paceline.data.pack.writer import parts_of
from paceline.errors import DataError

_TARS = {"training": "train", "validation": "validation", "all": "all"}
_FOLDERS = {"training": "train", "validation": "val", "all": ""}
_ENDINGS = ((b"\x89PNG", "png"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))
_PARTS = {"train", "training", "val", "valid", "validation", "eval", "test"}
"""Names that mean a part of the data."""


@dataclass(frozen=True)
class Image:
    """An image on its way out."""

    number: int
    name: str
    """Its class folder and key, which no other image of its part has."""
    label: int
    encoded: bytes


def to_webdataset(
    index: Index, out: Path, samples: int = 1024, shuffle: int | None = None, tell: Tell | None = None
) -> dict[str, Any]:
    """Tars of so many samples each, in the order of keys or shuffled by a seed; what metadata.json says of them."""
    _empty(out)
    places = _class_places(index.classes)
    facts: dict[str, Any] = {"format": "webdataset", "classes": [*index.classes], "samples per shard": samples}
    facts |= {"shuffle": shuffle, "parts": {}}
    for part, table in parts_of(index):
        order = np.arange(len(table))
        if shuffle is not None:
            order = keyed.permutation(keyed.key(shuffle, "convert", part), len(table))
        images = _images(index.folder, table, places, tell, part, order.tolist(), dots=False)
        shards = 0
        for shards, start in enumerate(range(0, len(table), samples), start=1):
            path = out / f"{_TARS[part]}-{shards - 1:06}.tar"
            begun = path.with_suffix(".begun")
            with tarfile.open(begun, "w", format=tarfile.GNU_FORMAT) as tar:
                for _ in range(min(samples, len(table) - start)):
                    _add_sample(tar, next(images), table)
            begun.replace(path)
        facts["parts"][_TARS[part]] = {"samples": len(table), "shards": shards}
    (out / "metadata.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _add_sample(tar: tarfile.TarFile, image: Image, table: Table) -> None:
    """The image, its label as text, and as JSON what else there is: objects, and the key where the name is not it."""
    ending = "png" if image.encoded.startswith(b"\x89PNG") else "jpg"  # readers know these two
    members = {ending: image.encoded, "cls": str(image.label).encode()}
    said: dict[str, Any] = {}
    if table.rows["objects"][image.number]:
        said["bbox"] = table.objects_of(image.number).tolist()
    if (key := table.keys[image.number]) != image.name.rpartition("/")[2]:
        said[TRUE_KEY] = key
    if said:
        members["json"] = json.dumps({"label": image.label, **said}).encode()
    for name, content in members.items():
        header = tarfile.TarInfo(f"{image.name}.{name}")
        header.size = len(content)
        tar.addfile(header, io.BytesIO(content))


def to_folder(index: Index, out: Path, tell: Tell | None = None) -> dict[str, Any]:
    """Files in class folders, below train/ and val/ where there are two parts; how many of them."""
    _refuse_empty_classes(index)
    _empty(out)
    places = _class_places(index.classes)
    facts: dict[str, Any] = {"format": "folder", "classes": places, "parts": {}, "without a class": 0}
    for part, table in parts_of(index):
        for place in places:
            (out / _FOLDERS[part] / place).mkdir(parents=True)
        inside = np.flatnonzero((table.rows["flags"] & int(Flag.OTHER_LABEL)) == 0).tolist()
        for image in _images(index.folder, table, places, tell, part, inside, dots=True):
            (out / _FOLDERS[part] / f"{image.name}.{_ending(image.encoded)}").write_bytes(image.encoded)
        facts["parts"][_FOLDERS[part] or "all"] = len(inside)
        facts["without a class"] += len(table) - len(inside)
    return facts


def _images(
    folder: Path, table: Table, places: list[str], tell: Tell | None, part: str, order: list[int], dots: bool
) -> Iterator[Image]:
    """The images in this order, each with a name of its own; where dots end a key, there are none in names."""
    used: set[str] = set()
    for done, number in enumerate(order, start=1):
        row = table.rows[number]
        label = int(row["label"])
        key = table.keys[number] if dots else table.keys[number].replace(".", "_")
        name = start = f"{places[label] if 0 <= label < len(places) else 'other'}/{key}"
        copy = 1
        while name in used:
            copy += 1
            name = f"{start}-{copy}"
        used.add(name)
        encoded = read_bytes(folder / table.shards[int(row["shard"])], int(row["offset"]), int(row["length"]))
        if int(row["flags"]) & Flag.TILED:
            encoded = tiles.without_lengths(encoded)
        yield Image(number, name, label, encoded)
        if tell is not None:
            tell(f"writing {part}", done, len(order))


def _ending(encoded: bytes) -> str:
    """By what an image is, whatever it was called."""
    return next((ending for start, ending in _ENDINGS if encoded.startswith(start)), "jpg")


def _class_places(classes: tuple[str, ...]) -> list[str]:
    """A folder name for each class, such that sorting the names keeps the numbers of the classes."""
    if all(name.isdecimal() for name in classes):
        width = max(map(len, classes), default=1)
        padded = [name.zfill(width) for name in classes]
        if padded == sorted(set(padded)):
            return padded
    ordinary = all(re.fullmatch(r"\w[\w ,.()'-]*", name) and name.lower() not in _PARTS for name in classes)
    if ordinary and list(classes) == sorted(set(classes)):
        return list(classes)
    width = len(str(len(classes)))
    plain = [re.sub(r"[^\w-]+", "_", name)[:80] for name in classes]
    return [f"{number:0{width}}-{name}".rstrip("-") for number, name in enumerate(plain)]


def _refuse_empty_classes(index: Index) -> None:
    """A folder without training images is no class to any reader, and the classes behind it get other numbers."""
    there = set(index.training.rows["label"].tolist())
    empty = [name for number, name in enumerate(index.classes) if number not in there]
    if empty:
        raise DataError(
            f"{index.folder}: {len(empty):,} of {len(index.classes):,} classes have no training images: "
            f"{some_of(empty)}; as folders the others would get other numbers; write --to webdataset, which keeps them"
        )


def _empty(out: Path) -> None:
    """The folder to write into, which nothing else may be in."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise DataError(f"{out}: cannot be written: {fault.strerror}") from None
    if any(out.iterdir()):
        raise DataError(f"{out}: this folder is not empty; write a new folder")
