"""The validation images that a network finds hardest, kept on the device until the end of a validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device import widest_float
from paceline.model.metrics import Answers
from paceline.world import World

HARDEST = 64
"""How many images with the largest losses a validation during training keeps."""


@dataclass(frozen=True)
class HardImage:
    """A validation image and what the network says of it."""

    image: int
    """Its number among the validation images."""
    truth: int
    answer: int
    probability: float
    """How probable the network takes its answer to be."""
    loss: float

    @property
    def truth_probability(self) -> float:
        """How probable the network takes the truth to be."""
        return math.exp(-self.loss)


class Hardest:
    """The images with the largest losses that a replica has seen so far, at most `most` of them.

    Of equal losses the image with the smaller number comes first, so that any layout keeps the same ones.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._most = most
        self._rows = [torch.zeros(0, 5, dtype=widest_float(device), device=device)]
        """Loss, number, truth, answer and probability of each image, in pieces that are sorted once they are many."""
        self._count = 0

    def add(self, answers: Answers, images: Tensor) -> None:
        """Look at a batch of the images with these numbers, without waiting for the device."""
        loss = torch.where(answers.real, answers.loss, -math.inf)
        columns = (loss, images, answers.truth, answers.answer, answers.probability)
        self._rows.append(torch.stack([column.to(self._rows[0].dtype) for column in columns], dim=1))
        self._count += len(loss)
        if self._count > 2 * self._most:  # sorting after each batch would be slow where all images are kept
            self._sort()

    def _sort(self) -> Tensor:
        """All rows that may be among the hardest, the hardest first."""
        rows = _largest(torch.cat(self._rows), self._most)
        self._rows, self._count = [rows], len(rows)
        return rows

    def over_replicas(self, world: World) -> list[HardImage]:
        """The hardest images of all replicas, the hardest first."""
        own = self._sort()
        table = own.new_full((world.processes, self._most, 5), 0)
        table[world.process, :, 0] = -math.inf
        table[world.process, : len(own)] = own
        rows = world.all_reduce(table).flatten(0, 1).cpu()
        rows = _largest(rows[rows[:, 1].argsort(stable=True)], self._most)
        return [
            HardImage(int(image), int(truth), int(answer), probability, loss)
            for loss, image, truth, answer, probability in rows.tolist()
            if loss != -math.inf
        ]


def _largest(rows: Tensor, most: int) -> Tensor:
    """The rows with the largest losses; of equal ones, those that come first."""
    return rows[rows[:, 0].sort(descending=True, stable=True).indices[:most]]
