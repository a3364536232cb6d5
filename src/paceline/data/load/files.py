"""Decodes images in files ahead of the steps that need them, straight into the batch they belong to."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline import keyed, schedule
from paceline.augment.flip import draw_flips
from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.fingerprint import digest_of
from paceline.data.index.table import Flag
from paceline.data.load.batches import MicroBatch, Shares, ahead, endless, filled_up
from paceline.data.load.decode import Undecodable, decode_into
from paceline.data.load.image_files import Cache, Encoded, Numbers, Quarantine
from paceline.data.load.order import Order, Positions, judged, share, training_order
from paceline.data.load.validation_cache import Decoded, open_decoded
from paceline.data.load.workers import Chunk, Faults, Pictures, Processes, Threads, Workers
from paceline.errors import DataError
from paceline.planning import Plan
from paceline.settings.data import Files
from paceline.settings.placement import MOST_THREADS
from paceline.user_code import own_function

CHUNK = 8
"""Images that one worker decodes at a time: few enough that a micro-batch keeps every worker busy."""
IMAGES_AHEAD = 2048
"""About how many images are decoded before they are needed, where a step is small."""
SWITCH = 0.00001
"""Seconds after which a thread that computes in Python lets another one go on. Python's own 5 ms would hold up a
thread that decodes for longer than decoding takes, each time it comes back from the decoder."""

Opens = Callable[[], tuple[Encoded, Encoded]]
"""Opens what is trained on and what is judged; workers of their own call it again."""
Finish = Callable[[], tuple[Tensor, Tensor]]
"""Waits for a batch that is being decoded: its pictures and labels, on the device."""


class Filler:
    """Reads and decodes images into their places, in a replica or in one of its workers."""

    def __init__(self, plan: Plan, splits: tuple[Encoded, Encoded]) -> None:
        assert isinstance(plan.data, Files)
        self._plan, self._data = plan, plan.data
        self._splits = {split.split: split for split in splits}
        self._own = own_function(plan.recipe.augment.python)

    def __call__(self, chunk: Chunk, into: Pictures) -> Faults:
        """Decode a chunk."""
        split, faults = self._splits[chunk.split], []
        for place, number in enumerate(chunk.numbers.tolist()):
            fault = self.decode(split, number, chunk.boxes[place], bool(chunk.mirrored[place]), into[place])
            if fault is not None:
                faults.append((place, fault))
            elif chunk.positions is not None:
                self.change(int(chunk.positions[place]), into[place])
        return faults

    def decode(self, split: Encoded, number: int, box: NDArray[Any], mirror: bool, into: Pictures) -> str | None:
        """Decode one image; gives why it cannot be."""
        row = split.table.rows[number]
        flags = int(row["flags"])
        if flags & Flag.OTHER_LABEL:
            return f"its label {int(row['label'])} is none of the {self._plan.facts.classes} classes"
        try:
            decode_into(
                split.read(number), flags, int(row["width"]), int(row["height"]), box, mirror, self._data.resize, into,
                decoder="pillow" if self._plan.placement.decoder == "pillow" else "fast", turn=_turns(self._data),
            )  # fmt: skip
        except Undecodable as fault:
            return str(fault)
        return None

    def change(self, position: int, picture: Pictures) -> None:
        """What the recipe's own function makes of a training picture."""
        if self._own is None:
            return
        words = keyed.words(keyed.key(self._plan.recipe.seed, "python"), np.array([position]))
        name = self._plan.recipe.augment.python
        try:
            made = self._own(picture.copy(), np.concatenate(words).astype(np.uint32))
        except Exception as fault:  # noqa: BLE001 - a person's own function may raise anything
            last = traceback.extract_tb(fault.__traceback__)[-1]
            what = f"{type(fault).__name__}: {' '.join(str(fault).split())}".removesuffix(": ")
            raise DataError(f"augment.python={name} failed: {what} ({last.filename}:{last.lineno})") from None
        if not isinstance(made, np.ndarray) or made.shape != picture.shape or made.dtype != np.uint8:
            raise DataError(
                f"augment.python={name} gave {getattr(made, 'dtype', type(made).__name__)} "
                f"{getattr(made, 'shape', '')}; it should give uint8 {picture.shape}"
            )
        picture[:] = made


def filler(plan: Plan, opens: Opens, digest: str, cache: Cache) -> Filler:
    """What a worker process decodes with: what its replica has opened, by the digest of it, and the replica's cache."""
    splits = opens()
    if _digest(splits) != digest:
        raise DataError(f"{splits[0].folder}: the data have changed since the run began; start again")
    for split in splits:
        split.cache = cache
    return Filler(plan, splits)


def _digest(splits: tuple[Encoded, Encoded]) -> str:
    return digest_of(*(split.table for split in splits))


class Cuts(Protocol):
    """What is taken of the images of a batch, by their places in it."""

    @property
    def side(self) -> int:
        """Height and width of the pictures."""
        ...

    @property
    def positions(self) -> Positions | None:
        """Where they stand in the endless list, in training."""
        ...

    def cut(self, places: NDArray[np.int64], numbers: Numbers) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The boxes of their pixels, and which are mirrored; `numbers` are the images that stand at those places."""
        ...


class Stream:
    """Where a replica gets images that come in files."""

    def __init__(self, plan: Plan, opens: Opens, replica: int, device: torch.device, bad: Quarantine) -> None:
        assert isinstance(plan.data, Files)
        self._plan, self._data, self._replica, self._device, self._bad = plan, plan.data, replica, device, bad
        self._training, self._validation = splits = opens()
        self._fill = Filler(plan, splits)
        self._workers: Workers
        if plan.placement.loader_workers > MOST_THREADS:
            makes = partial(filler, plan, opens, _digest(splits), self._training.cache)
            self._workers = Processes(makes, plan.placement.loader_workers, device)
        else:
            self._workers = Threads(self._fill, plan.placement.loader_workers, device)
            sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        side, kept = plan.facts.evaluation_side or plan.facts.side, plan.placement.decoded_validation
        self._decoded = open_decoded(plan.data, self._validation, side, plan.placement.decoder) if kept else None

    def training(self, start: int) -> Shares:
        """Steps come in order whoever decodes first; a chunk of a micro-batch is one worker's piece of work."""
        plan, order = self._plan, training_order(self._plan)
        images = max(1, len(share(plan, 0, self._replica)) * plan.micro_batch)

        def submit(step: int) -> list[tuple[Finish, int]]:
            parts = share(plan, step, self._replica)
            cuts = [TrainingCuts(plan, self._training, order, part) for part in parts]
            begun = [self._begin(self._training, order.images(cut.positions), cut) for cut in cuts]
            return [(finish, int(part[0])) for finish, part in zip(begun, parts, strict=True)]

        try:
            with closing(ahead(endless(submit, start), max(1, min(8, IMAGES_AHEAD // images)))) as steps:
                for step in steps:
                    yield [_micro_batch(*finish(), plan.micro_batch, first) for finish, first in step]
        finally:
            self._workers.drop()

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is filled up to keep one shape, and says how many are real."""
        cuts = EvaluationCuts(self._plan, self._validation)

        def submit(numbers: Numbers) -> tuple[Finish, int]:
            whole = filled_up(numbers, self._plan.evaluation_batch)
            return self._begin(self._validation, whole, cuts, self._decoded), len(numbers)

        with closing(ahead(map(submit, judged(self._plan, self._replica)), 1)) as batches:
            for finish, count in batches:
                yield _micro_batch(*finish(), count)

    def close(self) -> None:
        """End those who decode."""
        self._workers.close()

    def _begin(self, split: Encoded, numbers: Numbers, cuts: Cuts, decoded: Decoded | None = None) -> Finish:
        """Start to decode a batch, but for what was decoded before."""
        batch = self._workers.batch((len(numbers), cuts.side, cuts.side, 3))
        shown = numbers.copy()
        kept = [
            decoded is not None and decoded.take(int(n), into) for n, into in zip(numbers, batch.pictures, strict=True)
        ]
        todo = np.flatnonzero(~np.array(kept))
        boxes, mirrored = cuts.cut(np.arange(len(numbers)), numbers)
        parts = []
        for some in _runs(todo):
            positions = None if cuts.positions is None else cuts.positions[some]
            chunk = Chunk(split.split, numbers[some], boxes[some], mirrored[some], positions)
            parts.append((some.start, batch.decode(chunk, some.start)))

        def finish() -> tuple[Tensor, Tensor]:
            for first, part in parts:
                for offset, fault in part():
                    place = first + offset
                    shown[place] = self._replace(split, int(numbers[place]), place, cuts, batch.pictures[place], fault)
            if decoded is not None:
                for place in todo[shown[todo] == numbers[todo]].tolist():  # a bad image is judged anew each time
                    decoded.keep(int(numbers[place]), batch.pictures[place])
            return batch.sent(), self._labels(split, shown)

        return finish

    def _replace(self, split: Encoded, bad: int, place: int, cuts: Cuts, into: Pictures, fault: str) -> int:
        """Put the next image that can be decoded in place of a bad one, cut as its place in the list says."""
        self._bad.add(split, bad, fault, self._is_bad)
        for number in split.after(bad):
            boxes, mirrored = cuts.cut(np.array([place]), np.array([number]))
            found = self._fill.decode(split, number, boxes[0], bool(mirrored[0]), into)
            if found is None:
                if cuts.positions is not None:
                    self._fill.change(int(cuts.positions[place]), into)
                return number
            self._bad.add(split, number, found, self._is_bad)
        raise DataError(f"none of the {split.count:,} {split.split} images can be decoded")

    def _is_bad(self, name: str, number: int) -> bool:
        """Whether an image of a split cannot be decoded as it is now, wherever it is cut."""
        split = self._training if name == self._training.split else self._validation
        if number >= split.count:
            return False
        (width,), (height,) = _sizes(self._plan, split.table.rows[[number]])
        whole, small = np.array([0, 0, height, width]), np.empty((8, 8, 3), np.uint8)
        return self._fill.decode(split, number, whole, False, small) is not None

    def _labels(self, split: Encoded, shown: Numbers) -> Tensor:
        labels = torch.from_numpy(split.labels_of(shown))
        return (labels.pin_memory() if self._device.type == "cuda" else labels).to(self._device, non_blocking=True)


def _micro_batch(pictures: Tensor, labels: Tensor, count: int, first: int = 0) -> MicroBatch:
    return MicroBatch(pictures.permute(0, 3, 1, 2), labels, count, first)


def _runs(places: NDArray[np.int64]) -> Iterator[slice]:
    """Neighboring places in pieces of up to CHUNK."""
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []:
        for first in range(int(run[0]), int(run[-1]) + 1, CHUNK):
            yield slice(first, min(first + CHUNK, int(run[-1]) + 1))


@dataclass(frozen=True)
class TrainingCuts:
    """Random crops and flips of a micro-batch, by where its images stand in the endless list."""

    plan: Plan
    split: Encoded
    order: Order
    positions: Positions

    @property
    def side(self) -> int:
        return schedule.side(self.plan, int(self.positions[0]) // self.plan.global_batch)

    def cut(self, places: NDArray[np.int64], numbers: Numbers) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        recipe, table, positions = self.plan.recipe, self.split.table, self.positions[places]
        rows = table.rows[numbers]
        boxes = training_boxes(
            recipe.seed, recipe.augment.crop, positions, *_sizes(self.plan, rows), rows, table.objects
        )
        mirrored = draw_flips(recipe, positions, numbers, self.order.epochs(positions))
        return boxes, mirrored.astype(bool)


@dataclass(frozen=True)
class EvaluationCuts:
    """What of validation images is judged."""

    plan: Plan
    split: Encoded
    positions: None = None

    @property
    def side(self) -> int:
        return self.plan.facts.evaluation_side or self.plan.facts.side

    def cut(self, places: NDArray[np.int64], numbers: Numbers) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        assert isinstance(self.plan.data, Files)
        sizes = _sizes(self.plan, self.split.table.rows[numbers])
        return evaluation_boxes(self.plan.data.evaluation, self.side, *sizes), np.zeros(len(places), bool)


def _sizes(plan: Plan, rows: NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Widths and heights as they are seen: turned where the data is to be."""
    assert isinstance(plan.data, Files)
    widths, heights = rows["width"].astype(np.int64), rows["height"].astype(np.int64)
    across = (rows["flags"] & Flag.ACROSS) > 0 if _turns(plan.data) else np.zeros(len(rows), bool)
    return np.where(across, heights, widths), np.where(across, widths, heights)


def _turns(data: Files) -> bool:
    return data.orientation == "honor"
