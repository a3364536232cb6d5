"""Work is timed in blocks, and told apart from waiting for its input."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from paceline.training import stopwatch
from paceline.training.stopwatch import Blocks, Fed, measure_blocks, measure_fed, over_replicas, timed
from paceline.world import World

WORLD = World(torch.device("cpu"))


def late(seconds: float) -> Iterator[int]:
    """Inputs that take a while."""
    for number in itertools.count():
        time.sleep(seconds)
        yield number


def work(_: int) -> int:
    time.sleep(0.001)
    return 4


def test_an_input_that_is_late_is_the_limit() -> None:
    result = measure_fed(WORLD, Fed(late(0.02), work), steps=2, seconds=0.05)
    assert result["waiting"] > 0.5
    assert result["images_per_second_without_input"] > 2 * result["images_per_second"]
    assert result["verdict"].startswith("the input is the limit: ")


def test_work_that_never_waits_is_not_measured_without_input(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def worked(_: int) -> int:
        now[0] += 0.001
        return 4

    result = measure_fed(WORLD, Fed(itertools.count(), worked), steps=2, seconds=0.01)
    assert result["waiting"] == 0
    assert result["images_per_second_without_input"] is None
    assert result["verdict"] is None


def test_the_result_is_what_the_blocks_of_the_replicas_say() -> None:
    result = measure_fed(WORLD, Fed(itertools.count(), work), steps=3, seconds=0.01)
    (replica,) = result["replica_blocks"]
    assert replica["images"] == [12] * result["blocks"]
    rates = sorted(images / seconds for images, seconds in zip(replica["images"], replica["seconds"], strict=True))
    spread = result["images_per_second_spread"]
    assert (spread["least"], spread["most"]) == (pytest.approx(rates[0]), pytest.approx(rates[-1]))
    assert spread["least"] <= result["images_per_second"] <= spread["most"]
    assert result["ms_per_step"] == pytest.approx(4000 / result["images_per_second"], rel=0.5)
    assert result["warm_up_steps"] >= 9


def test_warm_up_and_blocks_before_the_steady_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 8.0, 5.0, 2.0, *[1.0] * 20])

    def told(device: torch.device, task: object) -> float:
        assert callable(task)
        task()
        return next(times)

    monkeypatch.setattr(stopwatch, "timed", told)
    result = measure_fed(WORLD, Fed(itertools.count(), lambda _: 1), steps=10, seconds=1000)
    assert result["steady"]
    assert (result["blocks"], result["ms_per_step"], result["images_per_second"]) == (8, 100.0, 10.0)
    assert result["warm_up_seconds"] == 1.0 + 8.0 + 5.0 + 2.0
    assert result["warm_up_steps"] == 1 + 8 + 20


def test_blocks_are_measured_until_there_are_enough() -> None:
    blocks = measure_blocks(WORLD, Fed(itertools.count(), lambda _: 2), 5, lambda times: len(times) == 4)
    assert blocks.images == [[10, 10, 10, 10]]
    assert len(blocks.times) == len(blocks.rates) == 4


def test_waiting_is_that_of_the_replica_that_waited_longest() -> None:
    blocks = Blocks(1)
    blocks.add([[1.0, 8, 0.1], [2.0, 8, 1.0]])
    blocks.add([[1.0, 8, 0.1], [2.0, 8, 0.6]])
    assert blocks.waiting == pytest.approx(0.4)
    assert blocks.rates == [8.0, 8.0]


def test_one_replica_hears_itself() -> None:
    assert over_replicas(WORLD, [1.0, 2.5]) == [[1.0, 2.5]]


def test_time_passes_while_something_is_done() -> None:
    assert timed(WORLD.device, lambda: time.sleep(0.01)) >= 0.01
