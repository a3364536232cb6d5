"""Loaders of data sets that fit in memory: on the device, on the host, or made up for measuring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from paceline.augment.crop import crop, draw_offsets, pad
from paceline.augment.flip import draw_flips
from paceline.augment.pipeline import Draws, draw_each
from paceline.data.load.arrays import Source, Split
from paceline.data.load.batches import HostInputs, MicroBatch, StepBatches, ahead, fill_up, host_inputs
from paceline.data.load.order import evaluation_images, micro_batch_positions, training_order
from paceline.device import pinned, to_device
from paceline.numpy_types import Int64s
from paceline.planning import Plan

CROPPED_AT_ONCE = 4096
"""Images that are cropped and flipped on the device at a time."""


class OnDeviceLoader:
    """Keeps the whole data set on the device and crops and flips it there; only drawn numbers travel."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._replica, self._device = plan, replica, device
        self._training, self._validation = (self._padded(split) for split in (source.training, source.validation))

    def _padded(self, split: Split) -> tuple[Tensor, Tensor]:
        padded = pad(split.images, self._plan.recipe.augment)
        return torch.tensor(padded, device=self._device), torch.tensor(split.labels, device=self._device)

    def training(self, start: int) -> StepBatches:
        """Crops a few steps at a time, then splits them into micro-batches: a small network's steps are shorter than
        it takes to launch the kernels of a crop."""
        order, plan = training_order(self._plan), self._plan
        per_step = len(micro_batch_positions(plan, 0, self._replica))
        steps = max(1, CROPPED_AT_ONCE // max(1, per_step * plan.micro_batch))

        def prepare(chunk: int) -> tuple[Tensor, list[Draws]]:
            first = start + chunk * steps
            chunk_steps = range(first, first + steps)
            batches = [batch for step in chunk_steps for batch in micro_batch_positions(plan, step, self._replica)]
            positions = np.concatenate(batches) if batches else np.empty(0, np.int64)
            images = order.images(positions)
            offsets = draw_offsets(plan.recipe, positions)
            flipped = draw_flips(plan.recipe, positions, images, order.epochs(positions))
            rows = np.vstack([positions, images, offsets, flipped])
            return pinned(rows, self._device), draw_each(plan, batches, self._device)

        with closing(ahead(map(prepare, itertools.count(0)))) as chunks:
            for rows, draws in chunks:
                positions, *drawn = rows.to(self._device, non_blocking=True)
                cropped = (*self._crop(self._training, drawn), positions)
                pieces = list(zip(*(tensor.split(plan.micro_batch) for tensor in cropped), strict=True))
                for step in range(steps):
                    here = slice(step * per_step, (step + 1) * per_step)
                    yield [
                        MicroBatch(images, labels, plan.micro_batch, positions, one.to(self._device))
                        for (images, labels, positions), one in zip(pieces[here], draws[here], strict=True)
                    ]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is filled up to keep one shape."""
        for indices in evaluation_images(self._plan, self._replica):
            filled = fill_up(indices, self._plan.evaluation_batch)
            offsets = np.full((2, len(filled)), self._plan.recipe.augment.pad)  # these crop the padding off again
            drawn = to_device(np.vstack([filled, offsets, np.zeros_like(filled)]), self._device)
            yield MicroBatch(*self._crop(self._validation, list(drawn)), len(indices), indices=drawn[0])

    def validation_name(self, index: int) -> str:
        """The number of an image."""
        return str(index)

    def _crop(self, split: tuple[Tensor, Tensor], drawn: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Images and labels; the rows of `drawn` are indices, offsets and flips."""
        padded, labels = split
        indices, *offsets, flipped = drawn
        pixels = torch.arange(padded.shape[1] - 2 * self._plan.recipe.augment.pad, device=self._device)
        images: Tensor = crop(padded, indices, offsets, flipped, pixels)
        return images.permute(0, 3, 1, 2), labels[indices]


class HostLoader:
    """Prepares images on the host by threads, and copies each micro-batch to the device."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._source, self._replica, self._device = plan, source, replica, device

    def training(self, start: int) -> StepBatches:
        """A thread prepares a whole micro-batch; steps come in order whichever thread is first."""
        order, recipe, split = training_order(self._plan), self._plan.recipe, self._source.training
        pixels = np.arange(self._plan.facts.side)

        def prepare(positions: Int64s, indices: Int64s) -> tuple[Tensor, Tensor, HostInputs]:
            padded = pad(split.take(indices), recipe.augment)
            flipped = draw_flips(recipe, positions, indices, order.epochs(positions))
            images = crop(padded, np.arange(len(padded)), draw_offsets(recipe, positions), flipped, pixels)
            (inputs,) = host_inputs(self._plan, [positions], self._device)
            return pinned(images, self._device), pinned(split.labels_of(indices), self._device), inputs

        with ThreadPoolExecutor(self._plan.placement.loader_workers) as pool:

            def submit(step: int) -> list[Callable[[], tuple[Tensor, Tensor, HostInputs]]]:
                batches = micro_batch_positions(self._plan, step, self._replica)
                return [pool.submit(prepare, batch, order.images(batch)).result for batch in batches]

            with closing(ahead(map(submit, itertools.count(start)))) as steps:
                for results in steps:
                    prepared = [result() for result in results]
                    yield [inputs.batch(*self._send(images, labels)) for images, labels, inputs in prepared]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Every image once; the last batch is filled up to keep one shape."""
        split, size = self._source.validation, self._plan.evaluation_batch

        def prepare(indices: Int64s) -> tuple[Tensor, Tensor, Int64s, int]:
            filled = fill_up(indices, size)
            images, labels = split.take(filled), split.labels_of(filled)
            return pinned(images, self._device), pinned(labels, self._device), filled, len(indices)

        with closing(ahead(map(prepare, evaluation_images(self._plan, self._replica)))) as batches:
            for images, labels, indices, count in batches:
                yield MicroBatch(*self._send(images, labels), count, indices=to_device(indices, self._device))

    def validation_name(self, index: int) -> str:
        """The number of an image."""
        return str(index)

    def _send(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        on_device = images.to(self._device, non_blocking=True)
        return on_device.permute(0, 3, 1, 2), labels.to(self._device, non_blocking=True)


class SyntheticLoader:
    """Slices a pool of images that is made once on the device: what is measured has no image input at all."""

    def __init__(self, plan: Plan, source: Source, replica: int, device: torch.device) -> None:
        self._plan, self._replica, self._device = plan, replica, device
        self._training = self._pool(source.training, plan.micro_batch)
        self._validation = self._pool(source.validation, plan.evaluation_batch)

    def _pool(self, split: Split, size: int) -> tuple[Tensor, Tensor, int]:
        """The pool, followed by enough of it again that any batch is one slice."""
        pool = len(split.images)
        indices = np.arange(pool + size, dtype=np.int64)
        images = torch.tensor(split.take(indices), device=self._device).permute(0, 3, 1, 2)
        return images, torch.tensor(split.labels_of(indices), device=self._device), pool

    def training(self, start: int) -> StepBatches:
        """Slices of the pool, the same whatever the layout."""
        plan = self._plan

        def prepare(step: int) -> list[tuple[int, HostInputs]]:
            batches = micro_batch_positions(plan, step, self._replica)
            inputs = host_inputs(plan, batches, self._device)
            return [(int(positions[0]), one) for positions, one in zip(batches, inputs, strict=True)]

        with closing(ahead(map(prepare, itertools.count(start)))) as steps:
            for step in steps:
                yield [inputs.batch(*_slice(self._training, first, plan.micro_batch)) for first, inputs in step]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """Slices of the other pool, as many as the counted images need."""
        for indices in evaluation_images(self._plan, self._replica):
            first, size = int(indices[0]), self._plan.evaluation_batch
            numbers = torch.arange(first, first + size, device=self._device)
            yield MicroBatch(*_slice(self._validation, first, size), len(indices), indices=numbers)

    def validation_name(self, index: int) -> str:
        """The number of an image."""
        return str(index)


def _slice(pool: tuple[Tensor, Tensor, int], first: int, size: int) -> tuple[Tensor, Tensor]:
    images, labels, length = pool
    start = first % length
    return images[start : start + size], labels[start : start + size]
