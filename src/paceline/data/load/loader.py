"""Brings each step's images to the device: prepared ahead by threads, or cropped there when the whole set is there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.augment.crop import center_offsets, crop, draw_offsets, pad
from paceline.augment.flip import draw_flips
from paceline.data.load.arrays import Source, Split, open_source
from paceline.data.load.batches import Loader, MicroBatch, Shares, ahead, endless, filled_up, pinned
from paceline.data.load.files import Stream
from paceline.data.load.files_nvjpeg import DeviceStream
from paceline.data.load.image_files import Quarantine, open_splits
from paceline.data.load.order import Positions, judged, share, training_order
from paceline.planning import Plan
from paceline.settings.data import Files

GATHERED = 4096
"""Images that are cropped and flipped on the device at a time."""


def open_loader(plan: Plan, folder: Path | None, replica: int, device: torch.device, run: Path | None = None) -> Loader:
    """The loader that suits the data set and the placement; images that cannot be decoded are listed in `run`."""
    if isinstance(plan.data, Files):
        assert folder is not None
        bad = Quarantine.of(run, plan.data.bad_allowed(plan.facts.images + plan.facts.validation_images))
        kind = DeviceStream if plan.placement.decoder == "gpu" else Stream
        return kind(plan, partial(open_splits, plan, plan.data, folder), replica, device, bad)
    source = open_source(plan, folder)
    if plan.data.name == "synthetic":
        return Synthetic(plan, source, replica, device)
    splits = (source.training, source.validation)
    whole = plan.placement.resident and all(split.count == len(split.pictures) for split in splits)
    return Resident(plan, source, replica, device) if whole else Host(plan, source, replica, device)


class Resident:
    """The whole data set on the device, cropped and flipped there; only image numbers and moves travel."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._replica, self._device = plan, replica, device
        self._sets = [self._put(split) for split in (source.training, source.validation)]
        self._steps = torch.arange(plan.facts.side, device=device)

    def _put(self, split: Split) -> tuple[Tensor, Tensor]:
        wide = pad(split.pictures, self._plan.recipe.augment)
        return torch.tensor(wide, device=self._device), torch.tensor(split.labels, device=self._device)

    def training(self, start: int) -> Shares:
        """One gather for a few steps, then cut into micro-batches: a small network's steps are shorter than a gather's
        kernels take to launch."""
        order, plan = training_order(self._plan), self._plan
        passes = len(share(plan, 0, self._replica))
        steps = max(1, GATHERED // max(1, passes * plan.micro_batch))

        def prepare(chunk: int) -> tuple[Tensor, list[int]]:
            begin = start + chunk * steps
            parts = [part for step in range(begin, begin + steps) for part in share(plan, step, self._replica)]
            positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
            images = order.images(positions)
            offsets = draw_offsets(plan.recipe, positions)
            flipped = draw_flips(plan.recipe, positions, images, order.epochs(positions))
            return pinned(np.vstack([images, offsets, flipped]), self._device), [int(part[0]) for part in parts]

        with closing(ahead(endless(prepare, 0))) as chunks:
            for numbers, firsts in chunks:
                images, labels = self._cut(0, numbers)
                pieces = images.split(plan.micro_batch), labels.split(plan.micro_batch)
                cut = zip(firsts, *pieces, strict=bool(firsts))  # without images, torch still splits off an empty piece
                batches = [MicroBatch(i, n, plan.micro_batch, first) for first, i, n in cut]
                for step in range(steps):
                    yield batches[step * passes : (step + 1) * passes]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is padded to keep one shape, and says how many are real."""
        for numbers in judged(self._plan, self._replica):
            whole = filled_up(numbers, self._plan.evaluation_batch)
            offsets = center_offsets(self._plan.recipe.augment, len(whole))
            drawn = np.vstack([whole, offsets, np.zeros_like(whole)])
            yield MicroBatch(*self._cut(1, pinned(drawn, self._device)), len(numbers))

    def _cut(self, which: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        wide, labels = self._sets[which]
        chosen, *offsets, flipped = numbers.to(self._device, non_blocking=True)
        images: Tensor = crop(wide, chosen, offsets, flipped, self._steps)
        return images.permute(0, 3, 1, 2), labels[chosen]


class Host:
    """Images prepared on the host by threads, each micro-batch then copied to the device."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._source, self._replica, self._device = plan, source, replica, device
        assert isinstance(plan.placement.loader_threads, int)
        self._threads = plan.placement.loader_threads

    def training(self, start: int) -> Shares:
        """Each micro-batch is one thread's piece of work; steps come in order whoever finishes first."""
        order, recipe, split = training_order(self._plan), self._plan.recipe, self._source.training
        steps = np.arange(self._plan.facts.side)

        def prepare(positions: Positions, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor, int]:
            wide = pad(split.take(numbers), recipe.augment)
            flipped = draw_flips(recipe, positions, numbers, order.epochs(positions))
            images = crop(wide, np.arange(len(wide)), draw_offsets(recipe, positions), flipped, steps)
            labels = split.labels_of(numbers)
            return pinned(images, self._device), pinned(labels, self._device), int(positions[0])

        with ThreadPoolExecutor(self._threads) as pool:

            def submit(step: int) -> list[Callable[[], tuple[Tensor, Tensor, int]]]:
                parts = share(self._plan, step, self._replica)
                return [pool.submit(prepare, part, order.images(part)).result for part in parts]

            with closing(ahead(endless(submit, start))) as steps_ahead:
                for results in steps_ahead:
                    made = [result() for result in results]
                    yield [self._send(images, labels, len(images), first) for images, labels, first in made]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is padded to keep one shape, and says how many are real."""
        split, size = self._source.validation, self._plan.evaluation_batch

        def prepare(numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor, int]:
            whole = filled_up(numbers, size)
            pictures, labels = split.take(whole), split.labels_of(whole)
            return pinned(pictures, self._device), pinned(labels, self._device), len(numbers)

        with closing(ahead(map(prepare, judged(self._plan, self._replica)))) as batches:
            for images, labels, count in batches:
                yield self._send(images, labels, count)

    def _send(self, images: Tensor, labels: Tensor, count: int, first: int = 0) -> MicroBatch:
        moved = images.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        return MicroBatch(moved, labels.to(self._device, non_blocking=True), count, first)


class Synthetic:
    """A pool of images made once on the device, cut by position: what is measured has no input at all."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._replica = plan, replica
        self._training = self._fill(source.training, plan.micro_batch, device)
        self._validation = self._fill(source.validation, plan.evaluation_batch, device)

    def _fill(self, split: Split, size: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """The pool and enough of it again behind it that any batch is one slice."""
        pool = len(split.pictures)
        numbers = np.arange(pool + size, dtype=np.int64)
        images = torch.tensor(split.take(numbers), device=device).permute(0, 3, 1, 2)
        return images, torch.tensor(split.labels_of(numbers), device=device), pool

    def training(self, start: int) -> Shares:
        """Slices of the pool, the same whatever the layout."""
        while True:
            parts = share(self._plan, start, self._replica)
            yield [self._slice(self._training, part, self._plan.micro_batch) for part in parts]
            start += 1

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Slices of the other pool, as many as the counted images need."""
        for numbers in judged(self._plan, self._replica):
            yield self._slice(self._validation, numbers, self._plan.evaluation_batch)

    def _slice(self, filled: tuple[Tensor, Tensor, int], numbers: NDArray[np.int64], size: int) -> MicroBatch:
        images, labels, pool = filled
        place = int(numbers[0]) % pool
        return MicroBatch(images[place : place + size], labels[place : place + size], len(numbers), int(numbers[0]))
