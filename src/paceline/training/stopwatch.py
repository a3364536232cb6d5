"""Times work on a device, in blocks with one wait each, on all replicas together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import torch

from paceline.device import widest_float
from paceline.progress import Progress, silent
from paceline.training import timing
from paceline.world import World

Input = TypeVar("Input")


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until the device, which has nothing else to do, has done some work; by its own events on CUDA."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    begin = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - begin


def over_replicas(world: World, values: list[float]) -> list[list[float]]:
    """The values of every process, which all have as many, on every process."""
    rows = torch.zeros(world.processes, len(values), dtype=widest_float(world.device))
    rows[world.process] = torch.tensor(values, dtype=rows.dtype)
    everyone: list[list[float]] = world.all_reduce(rows.to(world.device)).tolist()
    return everyone


class Fed(Generic[Input]):
    """Work that takes one input after another, and how long it waited for them."""

    def __init__(self, inputs: Iterator[Input], work: Callable[[Input], int]) -> None:
        self._inputs, self._work = inputs, work
        self._last: Input | None = None
        self.waited = 0.0

    def step(self) -> int:
        """Work on the next input; gives the number of its images."""
        begin = time.perf_counter()
        self._last = next(self._inputs)
        self.waited += time.perf_counter() - begin
        return self._work(self._last)

    def again(self) -> int:
        """Work on the last input once more, without waiting for any."""
        assert self._last is not None
        return self._work(self._last)


@dataclass
class Blocks:
    """What was measured in blocks; the rows are replicas."""

    steps: int
    """Steps of a block."""
    seconds: list[list[float]] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    waited: list[list[float]] = field(default_factory=list)
    """Seconds of each block in which the work waited for its input."""

    def add(self, replicas: list[list[float]]) -> None:
        """Add a block: for each replica its seconds, images and seconds of waiting."""
        if not self.seconds:
            self.seconds, self.images, self.waited = (
                [[] for _ in replicas],
                [[] for _ in replicas],
                [[] for _ in replicas],
            )
        for replica, (seconds, images, waited) in enumerate(replicas):
            self.seconds[replica].append(seconds)
            self.images[replica].append(int(images))
            self.waited[replica].append(waited)

    @property
    def times(self) -> list[float]:
        """The time of each block on the slowest replica."""
        return timing.slowest(self.seconds)

    @property
    def rates(self) -> list[float]:
        """Images a second of each block."""
        return timing.rates(self.images, self.seconds)

    def counted(self) -> Blocks:
        """Those that count."""
        start = timing.first_counted(self.times)
        return Blocks(
            self.steps,
            [row[start:] for row in self.seconds],
            [row[start:] for row in self.images],
            [row[start:] for row in self.waited],
        )

    @property
    def waiting(self) -> float:
        """The share of the time in which the replica that waited longest had no input."""
        return max(sum(waited) / sum(seconds) for waited, seconds in zip(self.waited, self.seconds, strict=True))


def measure_blocks(
    world: World, fed: Fed[Any], steps: int, enough: Callable[[list[float]], bool], progress: Progress = silent,
    again: bool = False,
) -> Blocks:  # fmt: skip
    """Measure blocks until their times are enough; with `again`, of work on the last input only.

    What one replica does depends on the times of all, so that all do the same.
    """
    blocks, work = Blocks(steps), fed.again if again else fed.step
    images = 0

    def block() -> None:
        nonlocal images
        for _step in range(steps):
            images += work()

    wait_for(world.device)
    while not blocks.seconds or not enough(blocks.times):
        images, waited = 0, fed.waited
        seconds = timed(world.device, block)
        blocks.add(over_replicas(world, [seconds, images, fed.waited - waited]))
        progress("measuring", len(blocks.times), timing.MOST_BLOCKS)
    return blocks


def measure_fed(
    world: World, fed: Fed[Any], steps: int | None, seconds: float, progress: Progress = silent
) -> dict[str, Any]:
    """Warm up, then measure until the speed is steady; after that, the same without input if that was waited for.

    `steps` is the number of steps in a block, which follows from the time of a step if left out, and `seconds` how
    long to go on at most.
    """

    def slowest(work: Callable[[], object]) -> float:
        return max(row[0] for row in over_replicas(world, [timed(world.device, work)]))

    wait_for(world.device)
    warm_up = slowest(fed.step)
    count = timing.warm_steps(warm_up)
    warm_up_more = slowest(lambda: [fed.step() for _ in range(count)])
    steps = steps or timing.block_steps(warm_up_more / count)
    blocks = measure_blocks(world, fed, steps, lambda times: timing.is_measured(times, seconds), progress)
    counted = blocks.counted()
    dropped = blocks.times[: len(blocks.times) - len(counted.times)]
    rate, step_seconds = timing.spread(counted.rates), [time / steps for time in counted.times]
    alone = None
    if counted.waiting > timing.NOTICED:
        few = measure_blocks(world, fed, steps, lambda times: len(times) >= timing.AGREEING, again=True)
        alone = timing.spread(few.rates).median
    return {
        "images_per_second": rate.median,
        "images_per_second_spread": asdict(rate),
        "ms_per_step": 1000 * timing.spread(step_seconds).median,
        "ms_per_step_spread": asdict(timing.spread([1000 * each for each in step_seconds])),
        "warm_up_seconds": warm_up + warm_up_more + sum(dropped),
        "warm_up_steps": 1 + count + steps * len(dropped),
        "block_steps": steps,
        "blocks": len(counted.times),
        "steady": timing.steady_from(blocks.times) is not None,
        "waiting": counted.waiting,
        "images_per_second_without_input": alone,
        "verdict": timing.verdict(rate.median, counted.waiting, alone),
        "replica_blocks": [
            {"images": images, "seconds": seconds}
            for images, seconds in zip(counted.images, counted.seconds, strict=True)
        ],
    }
