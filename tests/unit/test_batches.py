"""What is prepared ahead: in order, a few at a time, with its faults, and with the numbers drawn for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from conftest import make_plan
from paceline.augment.pipeline import draw_each
from paceline.data.load.batches import AHEAD, ahead, host_inputs
from paceline.data.load.order import micro_batch_positions

EVERYTHING = (
    "augment.policy={name: randaugment, layers: 3}",
    "augment.color.hue=0.2",
    "augment.side={0%: 6, 2 steps: 8}",
    "augment.erase.probability=0.5",
    "augment.cutout=3",
    "mix.mixup=0.5",
)


def test_numbers_drawn_for_several_steps_together_are_those_of_each_micro_batch() -> None:
    plan, cpu = make_plan(*EVERYTHING, "on.micro_batch=4"), torch.device("cpu")
    batches = [positions for step in range(4) for positions in micro_batch_positions(plan, step, 0)]
    for positions, inputs in zip(batches, host_inputs(plan, batches, cpu), strict=True):
        (alone,) = draw_each(plan, [positions], cpu)
        assert np.array_equal(inputs.positions.numpy(), positions)
        assert inputs.draws.side == alone.side == (6 if positions[0] < 32 else 8)
        assert list(inputs.draws.numbers) == list(alone.numbers) == ["color", "erase", "cutout", "mix"]
        assert all(torch.equal(inputs.draws.numbers[name], alone.numbers[name]) for name in alone.numbers)
        assert inputs.draws.policy is not None
        assert alone.policy is not None
        assert inputs.draws.policy.groups == alone.policy.groups
        assert torch.equal(inputs.draws.policy.rows, alone.policy.rows)


def test_what_is_made_ahead_comes_in_order_and_ends() -> None:
    assert list(ahead(iter(range(50)))) == list(range(50))
    assert list(ahead(iter([]))) == []


def test_a_fault_in_the_preparing_thread_comes_through_after_what_was_made() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("the disk is gone")

    taken = ahead(items())
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def preparing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "images ahead"]


def test_the_preparing_thread_makes_only_a_few_ahead_and_stops_when_the_consumer_does() -> None:
    before = preparing()
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in itertools.count():
            made.append(i)
            yield i

    taken = ahead(items())
    assert next(taken) == 0
    mine = [thread for thread in preparing() if thread not in before]
    assert len(mine) == 1
    assert isinstance(taken, Iterator)
    taken.close()
    mine[0].join(30)
    assert not mine[0].is_alive()
    assert len(made) <= AHEAD + 3
