"""The images with the largest losses, whichever batches and replicas they came in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline import keyed
from paceline.model.hardest import Hardest, HardImage
from paceline.model.metrics import Answers
from paceline.world import World

CPU = torch.device("cpu")


def answers(losses: Tensor, count: int | None = None) -> Answers:
    """Answers of which only the losses matter."""
    numbers = torch.arange(len(losses))
    real = numbers < (len(losses) if count is None else count)
    return Answers(numbers, numbers + 1, torch.full_like(losses, 0.5), losses, real, real)


class Replica(World):
    """One of several replicas in this process, whose tables are added up once all are there."""

    def __init__(self, replica: int, replicas: int, tables: list[Tensor]) -> None:
        super().__init__(CPU, replica, replicas)
        self.tables = tables

    def all_reduce(self, values: Tensor) -> Tensor:
        self.tables.append(values)
        return torch.stack(self.tables).sum(0)


def hardest(losses: Tensor, most: int, size: int, replicas: int) -> list[HardImage]:
    """The hardest of all images, in batches of `size` that replicas take in turn."""
    numbers = torch.arange(len(losses))
    tables: list[Tensor] = []
    result: list[HardImage] = []
    for replica in range(replicas):
        hard = Hardest(most, CPU)
        for begin in range(replica * size, len(losses), replicas * size):
            hard.add(answers(losses[begin : begin + size]), numbers[begin : begin + size])
        result = hard.over_replicas(Replica(replica, replicas, tables))
    return result


@pytest.mark.parametrize(("size", "replicas"), [(40, 1), (7, 1), (4, 3), (1, 2), (16, 4)])
def test_the_same_images_are_the_hardest_on_every_layout(size: int, replicas: int) -> None:
    losses = torch.from_numpy(np.round(keyed.host_uniforms(keyed.key(0, "losses"), 40), 1))  # many are equal
    found = hardest(losses, 9, size, replicas)
    order = sorted(range(40), key=lambda image: (-float(losses[image]), image))[:9]
    assert [one.image for one in found] == order
    assert [one.loss for one in found] == [float(losses[image]) for image in order]


def test_nothing_is_sorted_before_the_end_where_all_images_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = Hardest(40, CPU)
    with monkeypatch.context() as patch:
        patch.delattr("paceline.model.hardest._largest")
        for begin in range(0, 40, 5):
            hard.add(answers(torch.arange(5.0) + begin), torch.arange(begin, begin + 5))
    assert [one.image for one in hard.over_replicas(World(CPU))] == list(range(39, -1, -1))


def test_an_image_that_only_fills_up_a_batch_is_never_hard() -> None:
    hard = Hardest(8, CPU)
    hard.add(answers(torch.tensor([1.0, 9.0, 2.0]), count=1), torch.arange(3))
    assert [one.image for one in hard.over_replicas(World(CPU))] == [0]


def test_a_loss_that_is_not_finite_is_the_largest() -> None:
    found = hardest(torch.tensor([1.0, math.nan, math.inf, 2.0]), 3, size=2, replicas=2)
    assert [one.image for one in found] == [1, 2, 3]


def test_the_probability_of_the_truth_follows_from_the_loss() -> None:
    assert HardImage(0, 1, 2, 0.7, -math.log(0.2)).truth_probability == pytest.approx(0.2)
