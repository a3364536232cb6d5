"""The order of images changes with the seed and the epoch, and with nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import make_plan
from paceline.data.load.order import Order, evaluation_images, micro_batch_positions, training_order


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        positions = np.arange(50 * number, 50 * (number + 1), dtype=np.int64)
        return [int(image) for image in Order(seed, 50, 50).images(positions)]

    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_dropping_the_tail_keeps_the_start_of_each_permutation() -> None:
    flow, drop = Order(3, 50, 50), Order(3, 50, 48)
    for epoch in range(3):
        places = np.arange(48, dtype=np.int64)
        assert np.array_equal(flow.images(epoch * 50 + places), drop.images(epoch * 48 + places))


def test_a_step_larger_than_the_data_set_goes_round_it_several_times() -> None:
    plan = make_plan("data.images=5", "epochs=10", "on.micro_batch=16")
    numbers = training_order(plan).images(micro_batch_positions(plan, 0, 0)[0])
    assert sorted(numbers[:5]) == sorted(numbers[5:10]) == sorted(numbers[10:15]) == list(range(5))


def test_a_replica_without_a_micro_batch_has_an_empty_list() -> None:
    plan = make_plan("on.micro_batch=8", "on.replicas=3")
    assert [len(micro_batch_positions(plan, 0, replica)) for replica in range(3)] == [1, 1, 0]


def test_the_order_does_not_depend_on_the_batch() -> None:
    small, large = make_plan("global_batch=4"), make_plan("global_batch=32", "norm_batch=4")
    positions = np.arange(300, dtype=np.int64)
    assert np.array_equal(training_order(small).images(positions), training_order(large).images(positions))


@pytest.mark.parametrize(("limit", "count"), [("10 images", 10), ("1 step", 16), ("100 images", 37)])
def test_a_part_of_the_validation_images_is_spread_over_all_on_any_layout(limit: str, count: int) -> None:
    evaluated = []
    for replicas, size in ((1, 1), (2, 4), (3, 1)):
        plan = make_plan(f"evaluate.limit={limit}", "norm=none", f"on.replicas={replicas}", f"on.micro_batch={size}")
        batches = [batch for replica in range(replicas) for batch in evaluation_images(plan, replica)]
        evaluated.append(sorted(np.concatenate(batches).tolist()))
    assert evaluated == [[37 * i // count for i in range(count)]] * 3
