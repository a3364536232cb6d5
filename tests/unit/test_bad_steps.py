"""Steps that are not finite: how many follow each other, and where one went wrong first."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from conftest import make_plan
from paceline.training.bad_steps import longest_streak
from paceline.training.replay import Watch
from paceline.training.restore import load_files
from paceline.training.save import to_files
from paceline.training.state import build_state, initialize_state
from paceline.world import World

WORLD = World(torch.device("cpu"))


@pytest.mark.parametrize(
    ("steps", "after", "longest"),
    [
        ([], 0, []),
        ([1], 0, [1]),
        ([1, 2, 3, 7, 8], 0, [1, 2, 3]),
        ([1, 2, 3, 7, 8], 3, [7, 8]),
        ([1, 2, 3, 7, 8], 2, [1, 2, 3]),  # a row that goes on after the report counts from its start
        ([1, 2, 3], 3, []),
        ([5, 7, 9], 0, [5]),
    ],
)
def test_rows_of_bad_steps_are_counted_across_reports_and_within_them(
    steps: list[int], after: int, longest: list[int]
) -> None:
    assert longest_streak(steps, after) == longest


def test_the_first_layer_of_all_micro_batches_is_named_with_every_image_that_it_concerns() -> None:
    class Odd(nn.Module):
        """Passes numbers on; from its own number on they become infinite."""

        def __init__(self, number: float) -> None:
            super().__init__()
            self.number = number

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.where(given == self.number, math.inf, given)

    network = nn.Sequential(Odd(1), Odd(2), Odd(3))
    watch = Watch(network)
    for watch.micro_batch, images in enumerate([[0, 3, 0, 0], [2, 0, 0, 3], [0, 0, 2, 3], [0, 0, 0, 0]]):
        network(torch.tensor(images, dtype=torch.float32)[:, None])
    assert watch.first() == ("1", [(1, 0), (2, 2)])
    watch.close()
    assert Watch(network).first() == (None, [])


def test_what_a_checkpoint_says_of_bad_steps_and_sums_that_are_not_finite_comes_back() -> None:
    plan = make_plan()
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    state.step = 4
    state.bad[1:3] = 1
    state.sums.fill_(math.nan)
    files = to_files(state)
    assert json.loads(files["state.json"], parse_constant=pytest.fail)["bad_steps"] == [2, 3]
    other = load_files(build_state(plan, WORLD), files, "test")
    assert other.bad_steps() == [2, 3]
    assert other.sums.isnan().all()
    assert other.last_sums.tolist() == [0, 0]
