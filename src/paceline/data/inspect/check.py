"""Looks at images in files: what is wrong with them, what they are, and what would help a run that waits for them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.scan import Tell, open_index
from paceline.data.index.table import Flag, Index, Rows, Table
from paceline.data.load.decode import MOST_PIXELS, Undecodable, decode_into
from paceline.data.pack.transcode import read_bytes
from paceline.errors import DataError, UserError
from paceline.planning import Plan
from paceline.settings.data import Files

WAITED = 0.2
"""The share of the time that training may wait for images before it says so."""
PRESET_SIDE = 500
"""The longest side of images in a pack that is made smaller by the usual preset."""

_CHUNK = 32
_PAUSE = 0.3
_THUMB = 8
"""Pixels a side of what a whole picture is resized to when only its decoding matters."""


@dataclass(frozen=True)
class Fault:
    """An image that training could not show."""

    split: str
    image: int
    name: str
    kind: str
    reason: str


def parts_of(index: Index) -> list[tuple[str, Table]]:
    """The parts of a data set that hold images; without a validation part, all of them are for training."""
    both = [("training", index.training), ("validation", index.validation)]
    return [(split, table) for split, table in both if len(table)]


def examine(index: Index, data: Files, threads: int, tell: Tell | None = None) -> Generator[Fault, None, None]:
    """Decode every image once, whole, and give each that cannot be, in the order of the index."""
    work = [
        (split, table, range(first, min(first + _CHUNK, len(table))))
        for split, table in parts_of(index)
        for first in range(0, len(table), _CHUNK)
    ]
    total, done = sum(len(numbers) for _, _, numbers in work), 0

    def look(split: str, table: Table, numbers: range) -> list[Fault]:
        judged = [(number, _judge(index, table, number, data)) for number in numbers]
        return [Fault(split, number, table.name(number), *found) for number, found in judged if found is not None]

    pool = ThreadPoolExecutor(threads, "examine")
    try:
        for piece, found in zip(work, pool.map(lambda piece: look(*piece), work), strict=True):
            yield from found
            done += len(piece[2])
            if tell is not None:
                tell("decoding", done, total)
    finally:
        pool.shutdown(cancel_futures=True)  # whoever stops listening need not wait for the rest


def _judge(index: Index, table: Table, number: int, data: Files) -> tuple[str, str] | None:
    """Why training could not show an image, as a kind and a reason; None where it could."""
    row = table.rows[number]
    flags, width, height = int(row["flags"]), int(row["width"]), int(row["height"])
    if flags & Flag.OTHER_LABEL:
        return "label outside the classes", f"its label {int(row['label'])} is none of the {len(index.classes)} classes"
    path = index.folder / table.shards[int(row["shard"])]
    try:
        encoded = _read(path, int(row["offset"]), int(row["length"]))
    except DataError as fault:
        return "cannot be read", str(fault).removeprefix(f"{path}: ")
    turn = data.orientation == "honor"
    whole = (0, 0, width, height) if turn and flags & Flag.ACROSS else (0, 0, height, width)
    try:
        thumb = np.empty((_THUMB, _THUMB, 3), np.uint8)
        decode_into(encoded, flags, width, height, whole, False, data.resize, thumb, turn=turn)
    except Undecodable as fault:
        return _kind(row), str(fault)
    return None


def _read(path: Path, offset: int, length: int) -> bytes:
    """The bytes of an image; a disk that fails for a moment is asked once more."""
    try:
        return read_bytes(path, offset, length)
    except DataError:
        time.sleep(_PAUSE)
        return read_bytes(path, offset, length)


def _kind(row: Any) -> str:
    """The kind of what cannot be decoded."""
    if row["length"] == 0:
        return "empty"
    if row["flags"] & Flag.UNREADABLE:
        return "no image header"
    return "too large" if int(row["width"]) * int(row["height"]) > MOST_PIXELS else "damaged"


def repeated(table: Table) -> int:
    """Images that have the key and the label of another one before them."""
    # Tables are sorted by key and then by label, so that such images are neighbors.
    named = zip(table.keys, table.rows["label"].tolist(), strict=True)
    return sum(before == here for before, here in pairwise(named))


def images_of(index: Index, table: Table) -> NDArray[np.int64]:
    """How many images of a part each class has."""
    labels = table.rows["label"]
    inside = labels[(labels >= 0) & (labels < len(index.classes))]
    return np.bincount(inside, minlength=len(index.classes)).astype(np.int64)


def survey(index: Index) -> dict[str, Any]:
    """What a data set is: its images, their sizes, encodings and bytes, by what the index knows of them."""
    rows = np.concatenate([index.training.rows, index.validation.rows])
    flags = rows["flags"]
    seen = rows[(flags & Flag.UNREADABLE) == 0]
    return {
        "format": index.kind,
        "folder": str(index.folder),
        "training images": len(index.training),
        "validation images": len(index.validation),
        "classes": len(index.classes),
        "width": _spread(seen["width"]),
        "height": _spread(seen["height"]),
        "encodings": _encodings(rows),
        "turned by EXIF": int(np.count_nonzero(flags & Flag.TURNED)),
        "with objects": int(np.count_nonzero(rows["objects"])),
        "labels outside the classes": int(np.count_nonzero(flags & Flag.OTHER_LABEL)),
        "bytes": int(rows["length"].sum(dtype=np.int64)),
        "notes": list(index.notes),
    }


def _spread(lengths: NDArray[Any]) -> dict[str, int] | None:
    """The smallest, the median and the largest of some lengths."""
    if not len(lengths):
        return None
    return {"smallest": int(lengths.min()), "median": int(np.median(lengths)), "largest": int(lengths.max())}


def _encodings(rows: Rows) -> dict[str, int]:
    """How many images are encoded in which way."""
    flags = rows["flags"]
    jpeg, tiled = (flags & Flag.JPEG) > 0, (flags & Flag.TILED) > 0
    sequential, unreadable = (flags & Flag.SEQUENTIAL) > 0, (flags & Flag.UNREADABLE) > 0
    kinds = {
        "JPEG in tiles": jpeg & tiled,
        "sequential JPEG": jpeg & sequential & ~tiled,
        "progressive JPEG": jpeg & ~sequential & ~tiled,
        "other": ~jpeg & ~unreadable,
        "no image header": unreadable,
    }
    return {kind: int(np.count_nonzero(chosen)) for kind, chosen in kinds.items()}


def advice(plan: Plan, waiting: float, images_per_second: float, table: Table, cores: int) -> str | None:
    """What a run that waits for images in files should be told: how much it waits, and what would help here."""
    if waiting <= WAITED or not isinstance(plan.data, Files):
        return None
    remedies = _remedies(plan, table, cores)
    remedy = f"what may help: {', or '.join(remedies)}" if remedies else "more cores would help"
    threads = plan.placement.loader_workers
    return (
        f"{waiting:.0%} of the time is spent waiting for images ({images_per_second:,.0f} images/s with "
        f"on.loader_workers={threads}); {remedy}; paceline bench data measures it"
    )


def _remedies(plan: Plan, table: Table, cores: int) -> list[str]:
    """What has not been done yet for images to come faster, and could be on this machine."""
    placement, flags = plan.placement, table.rows["flags"]
    jpeg, tiled = (np.count_nonzero(flags & kind) > len(flags) / 2 for kind in (Flag.JPEG, Flag.TILED))
    longest = np.maximum(table.rows["width"], table.rows["height"])
    room, by_device = max(1, cores // plan.replicas), placement.decoder == "gpu"
    found = []
    if placement.loader_workers < room:
        found.append(f"on.loader_workers={room}")
    if placement.decoder == "pillow":
        found.append("on.decoder=fast")
    if jpeg and not tiled and not by_device:  # the accelerator decodes whole images, tiles or not
        found.append("a pack (paceline data pack SOURCE OUT)")
    elif not jpeg or np.median(longest) > PRESET_SIDE:
        found.append(f"a smaller pack (paceline data pack SOURCE OUT --max-side {PRESET_SIDE} --quality 90)")
    if placement.device == "cuda" and not by_device and plan.recipe.augment.python is None and has_torchvision():
        found.append("on.decoder=gpu")
    return found


def has_torchvision() -> bool:
    """Whether the accelerator can be asked to decode."""
    return importlib.util.find_spec("torchvision") is not None


class Watch:
    """Hears the reports of one start, and gives once what to say where training waits for images."""

    def __init__(self, plan: Plan, folder: Path | None, cores: int) -> None:
        self._plan, self._folder, self._cores = plan, folder, cores
        self._rhythm = plan.rhythm(plan.recipe.report)
        self._reports, self._said = 0, False

    def heard(self, report: Mapping[str, Any]) -> str | None:
        """What to say after a report; the first one, and one of a part of an interval, say nothing of the rest."""
        data = self._plan.data
        self._reports += 1
        if self._said or self._reports == 1 or not self._rhythm.due(report["step"]):
            return None
        if report["waiting"] <= WAITED or not isinstance(data, Files) or self._folder is None:
            return None
        self._said = True
        try:
            table = open_index(data, self._folder).training
        except (UserError, OSError):
            return None  # files that have changed meanwhile may not end a run for the sake of advice
        return advice(self._plan, report["waiting"], report["images_per_second"], table, self._cores)
