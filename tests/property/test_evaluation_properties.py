"""What a validation counts: the same for every number of replicas and every micro-batch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import make_plan, make_session
from paceline.training.evaluate import Evaluation, evaluate
from paceline.world import World
from replicas_made import Circle, in_threads

WORDS = ("on.precision=fp64", "norm=none", "global_batch=48", "data.classes=5", "data.validation_images=61")


class Replica(World):
    """One of several replicas that are threads of this process; each has a network of its own."""

    def __init__(self, circle: Circle, replica: int) -> None:
        super().__init__(torch.device("cpu"), replica, circle.count)
        self.circle = circle

    def all_reduce(self, values: Tensor) -> Tensor:
        return values.copy_(self.circle.bring(self.replica, values).sum(0))


def evaluations(micro_batch: int, replicas: int, hardest: int) -> list[Evaluation]:
    """What each replica knows at the end of a validation of the initial weights."""
    plan = make_plan(*WORDS, f"on.micro_batch={micro_batch}", f"on.replicas={replicas}")
    circle, found = Circle(replicas), dict[int, Evaluation]()

    def work(replica: int) -> None:
        world = World(torch.device("cpu")) if replicas == 1 else Replica(circle, replica)
        found[replica] = evaluate(make_session(plan, world=world), hardest)

    in_threads(replicas, work)
    return [found[replica] for replica in range(replicas)]


@functools.cache
def expected() -> Evaluation:
    return evaluations(48, 1, hardest=61)[0]


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.sampled_from([1, 2, 3, 4, 12, 24]), st.integers(1, 5), st.sampled_from([1, 7, 64]))
def test_counts_and_hardest_images_are_the_same_on_every_layout(micro_batch: int, replicas: int, hardest: int) -> None:
    whole = expected()
    for one in evaluations(micro_batch, replicas, hardest):
        assert one.row == pytest.approx(whole.row, rel=1e-9)
        assert one.row["images"] == 61
        for mine, its in zip(one.counts, whole.counts, strict=True):
            assert mine is not None
            assert its is not None
            assert torch.equal(mine, its)
        assert [image.image for image in one.hardest] == [image.image for image in whole.hardest[:hardest]]
        assert [image.answer for image in one.hardest] == [image.answer for image in whole.hardest[:hardest]]


def test_every_image_is_hard_to_some_degree() -> None:
    assert sorted(image.image for image in expected().hardest) == list(range(61))
    assert expected().counts.support.sum() == 61
