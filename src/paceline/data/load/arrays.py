"""Data sets as arrays of 8-bit images: read from CIFAR's files, drawn, or made up for measuring."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from paceline import keyed
from paceline.data.index.file import cache_folder
from paceline.data.index.locate import CIFAR_FILES
from paceline.data.load import shapes
from paceline.errors import DataError
from paceline.files import write_whole
from paceline.numpy_types import Int64s, UInt8s
from paceline.planning import Plan
from paceline.settings.data import POOL, Cifar, Files, Made, Shapes
from paceline.settings.recipe import Recipe

SHAPES_VERSION = 1
"""Goes up whenever `shapes` is drawn differently, so that an older cache is not used."""


@dataclass(frozen=True)
class Split:
    """Images (image, row, column, channel) and their labels; a pool smaller than `count` repeats."""

    images: UInt8s
    labels: Int64s
    count: int

    def take(self, indices: Int64s) -> UInt8s:
        """The images with these indices."""
        return self.images[indices % len(self.images)]

    def labels_of(self, indices: Int64s) -> Int64s:
        """The labels of the images with these indices."""
        return self.labels[indices % len(self.labels)]


@dataclass(frozen=True)
class Source:
    """A data set: its training and its validation split."""

    training: Split
    validation: Split


def open_source(plan: Plan, folder: Path | None) -> Source:
    """The data set of a plan, from the folder that was located for it."""
    return Source(open_split(plan.recipe, folder, "training"), open_split(plan.recipe, folder, "validation"))


def open_split(recipe: Recipe, folder: Path | None, part: Literal["training", "validation"]) -> Split:
    """One split of the data set of a recipe."""
    data, trains = recipe.data, part == "training"
    assert data is not None
    facts = data.facts
    count = facts.images if trains else facts.validation_images
    match data:
        case Shapes():
            return _split(*_shapes("train" if trains else "validation", count))
        case Cifar():
            assert folder is not None
            images, labels = _cifar(data.name, folder, CIFAR_FILES[data.name][0 if trains else 1])
            return _split(*choose_part(images, labels, count)) if trains else _split(images, labels)
        case Files():
            raise AssertionError("images in files have many sizes: data.load.files decodes them")
        case Made():
            return _generated(recipe, part, count, facts.side if trains else facts.evaluation_side or facts.side)


def _split(images: UInt8s, labels: Int64s) -> Split:
    return Split(images, labels, len(labels))


def _cifar(name: str, folder: Path, files: list[str]) -> tuple[UInt8s, Int64s]:
    """Records of label bytes (CIFAR-100: coarse, then fine) and three planes of 32 x 32 pixels."""
    label_bytes = 1 if name == "cifar10" else 2
    try:
        raw = np.concatenate([np.fromfile(folder / file, np.uint8) for file in files])
    except OSError as fault:
        raise DataError(f"{fault.filename or folder}: cannot be read: {fault.strerror}") from None
    records = raw.reshape(-1, label_bytes + 3072)
    labels = records[:, label_bytes - 1].astype(np.int64)
    classes = 10 if name == "cifar10" else 100
    if labels.max() >= classes:
        where = int(labels.argmax())
        raise DataError(
            f"{folder}: record {where} of {files[0]} and on has label {labels[where]}; {name} has {classes} classes"
        )
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def choose_part(images: UInt8s, labels: Int64s, count: int) -> tuple[UInt8s, Int64s]:
    """So many of the images, chosen at random but evenly from all classes; fewer ones are among more ones."""
    if count >= len(labels):
        return images, labels
    draws, _, _, _ = keyed.words(keyed.key(0, "cifar fraction"), np.arange(len(labels), dtype=np.int64))
    by_class = np.lexsort((draws, labels))
    _, firsts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    ranks = (np.arange(len(labels)) - np.repeat(firsts, counts)) / np.repeat(counts, counts)
    chosen = np.sort(by_class[np.lexsort((draws[by_class], ranks))[:count]])
    return images[chosen], labels[chosen]


def _shapes(split: str, count: int) -> tuple[UInt8s, Int64s]:
    """A split of `shapes`, from the cache if that is intact."""
    path = cache_folder() / f"shapes-{SHAPES_VERSION}-{split}.bin"
    size = count * shapes.SIDE * shapes.SIDE * 3
    if path.is_file():
        content = path.read_bytes()
        digest, body = content[:32], content[32:]
        if len(body) == size + count and hashlib.sha256(body).digest() == digest:
            pixels = np.frombuffer(body, np.uint8)
            return pixels[:size].reshape(count, shapes.SIDE, shapes.SIDE, 3), pixels[size:].astype(np.int64)
    images, labels = shapes.draw_shapes(split, count)
    body = images.tobytes() + labels.astype(np.uint8).tobytes()
    with suppress(OSError):  # without the cache the next start is only slower
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(body).digest() + body)
    return images, labels


def _generated(recipe: Recipe, split: str, count: int, side: int) -> Split:
    """A pool of random images that stands for `count` of them; its size may not depend on the placement."""
    pool = min(count, POOL)
    assert recipe.data is not None
    channels, classes = recipe.data.facts.channels, recipe.data.facts.classes
    size = pool * side * side * channels
    pixels = keyed.host_words(keyed.key(recipe.seed, "made", split), -(-size // 4)).view(np.uint8)[:size]
    labels = keyed.words(keyed.key(recipe.seed, "made labels", split), np.arange(pool, dtype=np.int64))[0]
    return Split(pixels.reshape(pool, side, side, channels), keyed.integers(labels, classes), count)
