"""Which image stands at which position of the endless list, and which positions a replica's micro-batches cover."""

from __future__ import annotations

import numpy as np

from paceline import keyed
from paceline.numpy_types import Int64s
from paceline.planning import Plan


class Order:
    """The endless list: epoch e is a permutation of the images that depends on (seed, e) alone."""

    def __init__(self, seed: int, images: int, epoch_images: int) -> None:
        self._seed, self._images, self._length = seed, images, epoch_images
        self._permutations: dict[int, Int64s] = {}

    def images(self, positions: Int64s) -> Int64s:
        """The index of the image at each position."""
        epochs, offsets = np.divmod(positions, self._length)
        result = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            result[here] = self._permutation(epoch)[offsets[here]]
        return result

    def epochs(self, positions: Int64s) -> Int64s:
        """The epoch that each position belongs to, counted from 0."""
        return positions // self._length

    def _permutation(self, epoch: int) -> Int64s:
        if epoch not in self._permutations:
            for old in [e for e in self._permutations if e < epoch - 1]:
                del self._permutations[old]
            self._permutations[epoch] = keyed.permutation(keyed.key(self._seed, "order", epoch), self._images)
        return self._permutations[epoch]


def training_order(plan: Plan) -> Order:
    """The endless list of a plan."""
    return Order(plan.recipe.seed, plan.facts.images, plan.epoch_images)


def micro_batch_positions(plan: Plan, step: int, replica: int) -> list[Int64s]:
    """The positions of each micro-batch that a replica runs in a step, counted from 0.

    Micro-batch k of a step covers neighbors and is run by replica k mod R, so that the norm groups of a round lie
    side by side on neighboring replicas.
    """
    start, size = step * plan.global_batch, plan.micro_batch
    return [
        np.arange(start + k * size, start + (k + 1) * size, dtype=np.int64)
        for k in range(replica, plan.micro_batches, plan.replicas)
    ]


def evaluation_images(plan: Plan, replica: int) -> list[Int64s]:
    """The validation images of each batch that a replica evaluates: every image is in exactly one.

    A part of them is spread evenly: the first ones would be of a few classes, where images are sorted by class.
    """
    size, count = plan.evaluation_batch, plan.evaluated_images
    images = np.arange(count, dtype=np.int64) * plan.facts.validation_images // count
    return [images[start : start + size] for start in range(0, count, size)[replica :: plan.replicas]]
