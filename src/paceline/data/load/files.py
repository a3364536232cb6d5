"""Decodes images in files ahead of the steps that need them, straight into the batch they belong to."""

from __future__ import annotations

import itertools
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

from paceline import keyed
from paceline.augment.flip import draw_flips
from paceline.augment.pipeline import training_side
from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.fingerprint import digest_of
from paceline.data.index.table import Flag
from paceline.data.load.batches import HostInputs, MicroBatch, StepBatches, ahead, fill_up, host_inputs
from paceline.data.load.cache import Cache
from paceline.data.load.decode import Undecodable, decode_into
from paceline.data.load.image_files import ImageFiles
from paceline.data.load.order import Order, evaluation_images, micro_batch_positions, training_order
from paceline.data.load.quarantine import Quarantine
from paceline.data.load.validation_cache import ValidationCache, open_validation_cache
from paceline.data.load.workers import Chunk, Faults, Processes, Threads, Workers
from paceline.device import to_device
from paceline.errors import DataError
from paceline.numpy_types import Bools, Int64s, UInt8s
from paceline.planning import Plan
from paceline.settings.data import Files
from paceline.settings.placement import MOST_THREADS
from paceline.user_code import load_user_code

CHUNK = 8
"""Images that one worker decodes at a time: few enough that a micro-batch keeps every worker busy."""
IMAGES_AHEAD = 2048
"""About how many images are decoded before they are needed, where a step is small."""

Opens = Callable[[], tuple[ImageFiles, ImageFiles]]
"""Opens the training and the validation images; worker processes call it again."""
Share = Callable[[Cache], Cache]
"""Gives all replicas of a host the cache of one of them."""
Finish = Callable[[], tuple[Tensor, Tensor, Int64s]]
"""Waits for a batch that is being decoded; returns its images and labels on the device, and which images these are."""


class ChunkDecoder:
    """Reads and decodes chunks of images, in a replica or in one of its workers."""

    def __init__(self, plan: Plan, splits: tuple[ImageFiles, ImageFiles]) -> None:
        assert isinstance(plan.data, Files)
        self._plan, self._data = plan, plan.data
        self._splits = {split.split: split for split in splits}
        name = plan.recipe.augment.python
        self._own = load_user_code("augment.python", name) if name is not None else None

    def __call__(self, chunk: Chunk, out: UInt8s) -> Faults:
        """Decode a chunk into `out`."""
        split, faults = self._splits[chunk.split], []
        for offset, index in enumerate(chunk.indices.tolist()):
            fault = self.decode(split, index, chunk.boxes[offset], bool(chunk.flipped[offset]), out[offset])
            if fault is not None:
                faults.append((offset, fault))
            elif chunk.positions is not None:
                self.apply_own(int(chunk.positions[offset]), out[offset])
        return faults

    def decode(self, split: ImageFiles, index: int, box: NDArray[Any], flip: bool, out: UInt8s) -> str | None:
        """Decode one image into `out`; returns why it cannot be decoded, or None."""
        row = split.table.rows[index]
        flags = int(row["flags"])
        if flags & Flag.OTHER_LABEL:
            return f"its label {int(row['label'])} is none of the {self._plan.facts.classes} classes"
        try:
            decode_into(
                split.read(index), flags, int(row["width"]), int(row["height"]), box, flip, self._data.resize, out,
                decoder="pillow" if self._plan.placement.decoder == "pillow" else "fast", turn=self._data.turns,
            )  # fmt: skip
        except Undecodable as fault:
            return str(fault)
        return None

    def apply_own(self, position: int, image: UInt8s) -> None:
        """Apply the user's own function to a training image, in place."""
        if self._own is None:
            return
        words = keyed.words(keyed.key(self._plan.recipe.seed, "python"), np.array([position]))
        name = self._plan.recipe.augment.python
        try:
            result = self._own(image.copy(), np.concatenate(words).astype(np.uint32))
        except Exception as fault:  # noqa: BLE001 - a user's function may raise anything
            last = traceback.extract_tb(fault.__traceback__)[-1]
            what = f"{type(fault).__name__}: {' '.join(str(fault).split())}".removesuffix(": ")
            raise DataError(f"augment.python={name} failed: {what} ({last.filename}:{last.lineno})") from None
        if not isinstance(result, np.ndarray) or result.shape != image.shape or result.dtype != np.uint8:
            raise DataError(
                f"augment.python={name} gave {getattr(result, 'dtype', type(result).__name__)} "
                f"{getattr(result, 'shape', '')}; it should give uint8 {image.shape}"
            )
        image[:] = result


def open_decoder(plan: Plan, opens: Opens, digest: str, cache: Cache) -> ChunkDecoder:
    """The decoder of a worker process, with its replica's cache; `digest` is that of the data its replica opened."""
    splits = opens()
    if _digest(splits) != digest:
        raise DataError(f"{splits[0].folder}: the data have changed since the run began; start again")
    for split in splits:
        split.cache = cache
    return ChunkDecoder(plan, splits)


def _digest(splits: tuple[ImageFiles, ImageFiles]) -> str:
    return digest_of(*(split.table for split in splits))


class Crops(Protocol):
    """Which box of each image of a batch is decoded."""

    @property
    def side(self) -> int:
        """Height and width of the decoded images."""

    @property
    def positions(self) -> Int64s | None:
        """Where training images stand in the endless list."""

    def boxes(self, offsets: Int64s, indices: Int64s) -> tuple[NDArray[Any], Bools]:
        """The boxes of these images, and which are flipped; `offsets` are the places in the batch that they fill."""


class FileLoader:
    """Loads images in files, decoded by threads or processes of the host."""

    def __init__(
        self, plan: Plan, opens: Opens, replica: int, device: torch.device, bad: Quarantine, share: Share | None = None
    ) -> None:
        assert isinstance(plan.data, Files)
        self._plan, self._data, self._replica, self._device, self._bad = plan, plan.data, replica, device, bad
        self._training, self._validation = splits = opens()
        if share is not None and plan.placement.cache:
            self._training.cache = self._validation.cache = share(self._training.cache)
        self._decoder = ChunkDecoder(plan, splits)
        self._workers: Workers
        if plan.placement.loader_workers > MOST_THREADS:
            open_here = partial(open_decoder, plan, opens, _digest(splits), self._training.cache)
            self._workers = Processes(open_here, plan.placement.loader_workers, device)
        else:
            self._workers = Threads(self._decoder, plan.placement.loader_workers, device)
        self._validation_cache: ValidationCache | None = None
        if plan.placement.decoded_validation:
            side = plan.facts.evaluation_side or plan.facts.side
            self._validation_cache = open_validation_cache(plan.data, self._validation, side, plan.placement.decoder)

    def training(self, start: int) -> StepBatches:
        """Steps come in order whichever image is decoded first; one worker decodes a chunk of a micro-batch."""
        plan, order = self._plan, training_order(self._plan)
        per_step = max(1, len(micro_batch_positions(plan, 0, self._replica)) * plan.micro_batch)

        def submit(step: int) -> list[tuple[Finish, HostInputs]]:
            batches = micro_batch_positions(plan, step, self._replica)
            crops = [TrainingCrops(plan, self._training, order, positions) for positions in batches]
            finishes = [self._begin(self._training, order.images(one.positions), one) for one in crops]
            return list(zip(finishes, host_inputs(plan, batches, self._device), strict=True))

        try:
            with closing(ahead(map(submit, itertools.count(start)), max(1, min(8, IMAGES_AHEAD // per_step)))) as steps:
                for step in steps:
                    yield [inputs.batch(*finish()[:2]) for finish, inputs in step]
        finally:
            self._workers.cancel()

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is filled up to keep one shape."""
        crops = EvaluationCrops(self._plan, self._validation)

        def submit(indices: Int64s) -> tuple[Finish, int]:
            filled = fill_up(indices, self._plan.evaluation_batch)
            return self._begin(self._validation, filled, crops, self._validation_cache), len(indices)

        with closing(ahead(map(submit, evaluation_images(self._plan, self._replica)), 1)) as batches:
            for finish, count in batches:
                images, labels, shown = finish()
                yield MicroBatch(images, labels, count, indices=to_device(shown, self._device))

    def validation_name(self, index: int) -> str:
        """Where a person finds a validation image."""
        return self._validation.table.name(index)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _begin(self, split: ImageFiles, indices: Int64s, crops: Crops, cache: ValidationCache | None = None) -> Finish:
        """Start to decode a batch, except what the cache holds."""
        batch = self._workers.batch((len(indices), crops.side, crops.side, 3))
        shown = indices.copy()
        cached = [cache is not None and cache.load(int(i), out) for i, out in zip(indices, batch.images, strict=True)]
        missing = np.flatnonzero(~np.array(cached))
        boxes, flipped = crops.boxes(np.arange(len(indices)), indices)
        chunks = []
        for run in _runs(missing):
            positions = None if crops.positions is None else crops.positions[run]
            chunk = Chunk(split.split, indices[run], boxes[run], flipped[run], positions)
            chunks.append((run.start, batch.decode(chunk, run.start)))

        def finish() -> tuple[Tensor, Tensor, Int64s]:
            for first, decoded in chunks:
                for offset, fault in decoded():
                    at = first + offset
                    shown[at] = self._replace(split, int(indices[at]), at, crops, batch.images[at], fault)
            if cache is not None:
                for at in missing[shown[missing] == indices[missing]].tolist():  # bad images are decoded anew each time
                    cache.store(int(indices[at]), batch.images[at])
            return batch.to_device().permute(0, 3, 1, 2), self._labels(split, shown), shown

        return finish

    def _replace(self, split: ImageFiles, bad: int, offset: int, crops: Crops, out: UInt8s, fault: str) -> int:
        """Decode the next good image in place of a bad one, with the crop of that place in the list."""
        self._bad.add(split, bad, fault, self._is_bad)
        for index in split.after(bad):
            boxes, flipped = crops.boxes(np.array([offset]), np.array([index]))
            reason = self._decoder.decode(split, index, boxes[0], bool(flipped[0]), out)
            if reason is None:
                if crops.positions is not None:
                    self._decoder.apply_own(int(crops.positions[offset]), out)
                return index
            self._bad.add(split, index, reason, self._is_bad)
        raise DataError(f"none of the {split.count:,} {split.split} images can be decoded")

    def _is_bad(self, name: str, index: int) -> bool:
        """Whether an image of a split still cannot be decoded, wherever it is cropped."""
        split = self._training if name == self._training.split else self._validation
        if index >= split.count:
            return False
        (width,), (height,) = _sizes(self._plan, split.table.rows[[index]])
        whole, small = np.array([0, 0, height, width]), np.empty((8, 8, 3), np.uint8)
        return self._decoder.decode(split, index, whole, False, small) is not None

    def _labels(self, split: ImageFiles, indices: Int64s) -> Tensor:
        return to_device(split.labels_of(indices), self._device)


def _runs(offsets: Int64s) -> Iterator[slice]:
    """Neighboring offsets in slices of up to CHUNK."""
    for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1) if len(offsets) else []:
        for first in range(int(run[0]), int(run[-1]) + 1, CHUNK):
            yield slice(first, min(first + CHUNK, int(run[-1]) + 1))


@dataclass(frozen=True)
class TrainingCrops:
    """Random crops and flips of a micro-batch, keyed to the positions of its images in the endless list."""

    plan: Plan
    split: ImageFiles
    order: Order
    positions: Int64s

    @property
    def side(self) -> int:
        return training_side(self.plan, self.positions)

    def boxes(self, offsets: Int64s, indices: Int64s) -> tuple[NDArray[Any], Bools]:
        recipe, table, positions = self.plan.recipe, self.split.table, self.positions[offsets]
        rows = table.rows[indices]
        boxes = training_boxes(
            recipe.seed, recipe.augment.crop, positions, *_sizes(self.plan, rows), rows, table.objects
        )
        return boxes, draw_flips(recipe, positions, indices, self.order.epochs(positions)).astype(bool)


@dataclass(frozen=True)
class EvaluationCrops:
    """The crops of validation images."""

    plan: Plan
    split: ImageFiles
    positions: None = None

    @property
    def side(self) -> int:
        return self.plan.facts.evaluation_side or self.plan.facts.side

    def boxes(self, offsets: Int64s, indices: Int64s) -> tuple[NDArray[Any], Bools]:
        assert isinstance(self.plan.data, Files)
        sizes = _sizes(self.plan, self.split.table.rows[indices])
        return evaluation_boxes(self.plan.data.evaluation, self.side, *sizes), np.zeros(len(offsets), bool)


def _sizes(plan: Plan, rows: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Widths and heights after an image was turned upright, where the data say so."""
    assert isinstance(plan.data, Files)
    widths, heights = rows["width"].astype(np.int64), rows["height"].astype(np.int64)
    across = (rows["flags"] & Flag.ACROSS) > 0 if plan.data.turns else np.zeros(len(rows), bool)
    return np.where(across, heights, widths), np.where(across, widths, heights)
