"""Compares what an exported file computes with what the run's own network does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.exporting.request import ComparedImages
from paceline.exporting.writers import Scores
from paceline.numpy_types import Int64s
from paceline.prediction import given_batches
from paceline.training.opened import OpenedRun
from paceline.training.session import torch_settings

Batches = list[NDArray[np.uint8]]
"""Images [images, side, side, 3], several at a time."""
BATCH = 16
"""Images that an exported network is given at a time."""
ENOUGH = 0.99
"""The share of answers that must be equal."""


@dataclass(frozen=True)
class Comparison:
    """How an exported network differs from the run's own, on some images."""

    images: int
    equal: int
    """Images for which both give the same class."""
    difference: float
    """The largest difference of a score."""
    largest: float
    """The largest score."""
    milliseconds: float
    """The exported network's time for an image, in batches of BATCH, on this machine's CPU."""
    by: str
    """What ran the file."""
    classes: dict[str, tuple[int, int]]
    """For each class that occurs among the images, how many there are and how many are answered right."""

    @property
    def agrees(self) -> bool:
        """Whether enough answers are equal."""
        return self.equal >= ENOUGH * self.images


def compare(opened: OpenedRun, batches: Batches, labels: Int64s | None, exported: Scores, by: str) -> Comparison:
    """Run both networks on the same images."""
    with torch_settings(opened.plan.placement):
        ours = np.concatenate([_own_scores(opened, images) for images in batches])
    pixels = np.concatenate(batches)
    exported(pixels[:1])  # one image is a batch too; and the first calls prepare the others
    exported(pixels[:BATCH])
    begin = time.perf_counter()
    theirs = np.concatenate([exported(piece) for piece in _pieces(pixels)])
    seconds = time.perf_counter() - begin
    answers = theirs.argmax(1)
    return Comparison(
        images=len(pixels),
        equal=int((ours.argmax(1) == answers).sum()),
        difference=float(abs(ours - theirs).max()),
        largest=float(abs(ours).max()),
        milliseconds=1000 * seconds / len(pixels),
        by=by,
        classes={} if labels is None else _by_class(opened.classes, labels, answers),
    )


def _own_scores(opened: OpenedRun, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(opened.world.device)
    return np.asarray(opened.scores(images).float().cpu().numpy(), np.float32)


def _pieces(pixels: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    for first in range(0, len(pixels), BATCH):
        yield pixels[first : first + BATCH]


def _by_class(names: tuple[str, ...], labels: Int64s, answers: NDArray[np.int64]) -> dict[str, tuple[int, int]]:
    return {
        names[label]: (int((labels == label).sum()), int((answers[labels == label] == label).sum()))
        for label in np.unique(labels).tolist()
        if 0 <= label < len(names)
    }


def sample_batches(opened: OpenedRun, sample: ComparedImages) -> tuple[Batches, Int64s | None]:
    """The images of a sample in batches as a validation sees them, and the labels of all if they are known; images that
    cannot be decoded are left out."""
    if sample.table is None:
        assert sample.pixels is not None
        return [sample.pixels], sample.labels
    batches, seen = list[NDArray[np.uint8]](), [np.zeros(0, np.int64)]
    for batch, offsets, indices in given_batches(opened, sample.table, {}, sample.folder):
        batches.append(batch.images.permute(0, 2, 3, 1)[offsets].cpu().numpy())
        seen.append(indices)
    shown = np.concatenate(seen)
    if not len(shown):
        raise DataError("none of the images to compare the export on can be decoded; name others with --images")
    return batches, None if sample.labels is None else sample.labels[shown]
