"""The images themselves, as 8-bit pictures by number: read from CIFAR's files, drawn, or made up for measuring."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.data.index.file import cache_folder
from paceline.data.index.locate import CIFAR_FILES
from paceline.data.load import shapes
from paceline.errors import DataError
from paceline.files import write_whole
from paceline.planning import Plan
from paceline.settings.data import Cifar, Files, Made, Shapes

Pictures = NDArray[np.uint8]
Numbers = NDArray[np.int64]

POOL = 256
"""How many different pictures `generated` and `synthetic` sets have."""

SHAPES_VERSION = 1
"""Goes up whenever `shapes` is drawn differently, so that an older cache is not used."""


@dataclass(frozen=True)
class Split:
    """Pictures (height, width, channel) and their labels; a pool smaller than `count` repeats."""

    pictures: Pictures
    labels: Numbers
    count: int

    def take(self, numbers: Numbers) -> Pictures:
        """The pictures with these numbers."""
        return self.pictures[numbers % len(self.pictures)]

    def labels_of(self, numbers: Numbers) -> Numbers:
        """Their labels."""
        return self.labels[numbers % len(self.labels)]


@dataclass(frozen=True)
class Source:
    """A data set: what is trained on and what is judged."""

    training: Split
    validation: Split


def open_source(plan: Plan, folder: Path | None) -> Source:
    """The data set of a plan, from the folder that was located for it."""
    match plan.data:
        case Shapes():
            return Source(*(_whole(*_drawn(split, count)) for split, count in _shape_splits(plan)))
        case Cifar():
            assert folder is not None
            return Source(*(_whole(*_cifar(plan.data.name, folder, files)) for files in CIFAR_FILES[plan.data.name]))
        case Files():
            raise AssertionError("images in files have no pictures of one size: data.stream decodes them")
        case Made():
            return Source(
                _made(plan, "training", plan.data.images), _made(plan, "validation", plan.data.validation_images)
            )


def _whole(pictures: Pictures, labels: Numbers) -> Split:
    return Split(pictures, labels, len(labels))


def _cifar(name: str, folder: Path, files: list[str]) -> tuple[Pictures, Numbers]:
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
    pictures = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pictures), labels


def _shape_splits(plan: Plan) -> list[tuple[str, int]]:
    return [("train", plan.facts.images), ("validation", plan.facts.validation_images)]


def _drawn(split: str, count: int) -> tuple[Pictures, Numbers]:
    """A split of `shapes`, from the cache when its content is what was drawn."""
    path = cache_folder() / f"shapes-{SHAPES_VERSION}-{split}.bin"
    size = count * shapes.SIDE * shapes.SIDE * 3
    if path.is_file():
        content = path.read_bytes()
        digest, body = content[:32], content[32:]
        if len(body) == size + count and hashlib.sha256(body).digest() == digest:
            pixels = np.frombuffer(body, np.uint8)
            return pixels[:size].reshape(count, shapes.SIDE, shapes.SIDE, 3), pixels[size:].astype(np.int64)
    pictures, labels = shapes.draw(split, count)
    body = pictures.tobytes() + labels.astype(np.uint8).tobytes()
    _keep(path, hashlib.sha256(body).digest() + body)
    return pictures, labels


def _keep(path: Path, content: bytes) -> None:
    """Write the cache whole or not at all; a cache that cannot be written is only slower."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError:
        return


def _made(plan: Plan, split: str, count: int) -> Split:
    """A pool of random pictures that stands for `count` of them; its size may not depend on the placement."""
    pool = min(count, POOL)
    side, channels = plan.facts.side, plan.facts.channels
    size = pool * side * side * channels
    words = keyed.words(keyed.key(plan.recipe.seed, "made", split), np.arange((size + 15) // 16, dtype=np.int64))
    pixels = np.stack(words, axis=1).astype(np.uint32).view(np.uint8).reshape(-1)[:size]
    labels = keyed.words(keyed.key(plan.recipe.seed, "made labels", split), np.arange(pool, dtype=np.int64))[0]
    return Split(pixels.reshape(pool, side, side, channels), keyed.integers(labels, plan.facts.classes), count)
