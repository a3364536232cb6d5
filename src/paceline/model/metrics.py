"""What training and validation sum over images; means are taken once, from the sums over all replicas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.device import widest_float

TRAIN_SUMS = ("loss", "hits")
"""What is summed over the images of a step."""
Means = dict[str, float | int]
"""What a row of the record tells of a validation: mean loss, accuracies, calibration, and the number of images."""
MOST_CLASSES = 4096
"""Above this many classes no confusion matrix is counted: it would take more memory than it is worth."""
BINS = 15
"""Intervals of confidence over which the calibration error is taken."""
UNEQUAL = 1.25
"""Classes are unequal if the largest has more than this many times the images of a mean one."""
_UNIT = 2.0**24
"""Confidences are counted in whole units of 1 / this: sums of whole numbers do not depend on their order."""


class Answers(NamedTuple):
    """What a network says of each image of a validation batch."""

    truth: Tensor
    answer: Tensor
    """The class with the best score."""
    probability: Tensor
    """How probable the network takes its answer to be."""
    loss: Tensor
    top5: Tensor
    """Whether the truth is among the five best."""
    real: Tensor
    """Whether this is an image to count, and not one that fills up the batch."""


def judge(scores: Tensor, labels: Tensor, count: int) -> Answers:
    """The answers that class scores give for a batch, of which the first `count` images are real.

    Where a score is NaN there is no answer, and topk would take NaN for the best: the class after the true one stands
    in for it, so that it counts as wrong.
    """
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices
    none = scores.isnan().any(1)
    losses = F.cross_entropy(scores, labels, reduction="none")
    probabilities = scores.softmax(1).gather(1, best[:, :1])[:, 0]
    real = torch.arange(len(scores), device=scores.device) < count
    answer = torch.where(none, (labels + 1) % scores.shape[1], best[:, 0])
    return Answers(labels, answer, probabilities, losses, (best == labels[:, None]).any(1) & ~none, real)


class ClassCounts(NamedTuple):
    """How many validation images are of each class, were taken for it, and rightly so."""

    support: Tensor
    answered: Tensor
    right: Tensor
    confusion: Tensor | None
    """For each true class, a row with the images that were taken for each class; None above MOST_CLASSES."""

    @property
    def precision(self) -> Tensor:
        """Of the images that were taken for a class, the fraction that is of it; NaN where there are none."""
        return self.right.double() / self.answered

    @property
    def recall(self) -> Tensor:
        """Of the images of a class, the fraction that was taken for it; NaN where there are none."""
        return self.right.double() / self.support

    @property
    def f1(self) -> Tensor:
        """The harmonic mean of precision and recall; NaN for a class that has no image and was never answered."""
        return 2 * self.right.double() / (self.support + self.answered)


class EvaluationSums:
    """What is summed over validation images, in one tensor, so that replicas add up all of it at once.

    It begins with the loss and the images whose class was among the best five. For each interval of confidence follow
    its images, its hits and its confidences; then the confusion matrix or, with many classes, the counts of each class.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.classes, self._has_matrix = classes, classes <= MOST_CLASSES
        counts = classes * classes if self._has_matrix else 3 * classes
        self.flat = torch.zeros(2 + 3 * BINS + counts, dtype=widest_float(device), device=device)

    def add(self, answers: Answers) -> None:
        """Add the real images of a batch, without waiting for the device."""
        truth, answer, probability, loss, top5, real = answers
        hit, one = truth == answer, torch.ones_like(truth)
        bins = (probability.nan_to_num() * BINS).long().clamp(0, BINS - 1)
        places, values = [bins, bins + BINS, bins + 2 * BINS], [one, hit, (probability * _UNIT).round()]
        start, C = 3 * BINS, self.classes  # noqa: N806 - the field's letter
        if self._has_matrix:
            places, values = [*places, start + truth * C + answer], [*values, one]
        else:
            places += [start + truth, start + C + answer, start + 2 * C + truth]
            values += [one, one, hit]
        # All of these are whole numbers, which add up to the same bits in any order.
        self.flat[2:].scatter_add_(0, torch.stack(places).flatten(), self._masked(values, real).flatten())
        self.flat[:2] += self._masked([loss, top5], real).sum(1)

    def _masked(self, values: list[Tensor], real: Tensor) -> Tensor:
        return torch.where(real, torch.stack([row.to(self.flat.dtype) for row in values]), 0)

    def counts(self) -> ClassCounts:
        """The counts of each class."""
        counts = self.flat[2 + 3 * BINS :].long()
        if not self._has_matrix:
            support, answered, right = counts.view(3, -1)
            return ClassCounts(support, answered, right, None)
        matrix = counts.view(self.classes, -1)
        return ClassCounts(matrix.sum(1), matrix.sum(0), matrix.diagonal(), matrix)

    def means(self) -> Means:
        """The means over all images, and how many these are."""
        images, hits, confidences = self.flat[2 : 2 + 3 * BINS].view(3, BINS)
        total, counts = int(images.sum()), self.counts()
        means: Means = {
            "loss": float(self.flat[0]) / total,
            "top1": float(hits.sum()) / total,
            "top5": float(self.flat[1]) / total,
            "images": total,
            "balanced_accuracy": float(counts.recall.nanmean()),
            "macro_f1": float(counts.f1.nanmean()),
            "ece": float((hits - confidences / _UNIT).abs().sum()) / total,
        }
        largest, mean = int(counts.support.max()), total / int(counts.support.count_nonzero())
        return means | ({"majority": largest / total} if largest > UNEQUAL * mean else {})
