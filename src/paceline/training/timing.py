"""The rules by which `bench` turns times into numbers: when a speed is steady, medians, percentiles, verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

AGREEING, WITHIN = 3, 0.02
"""So many blocks in a row whose slowest is at most so much slower than the fastest are steady."""
COUNTED = 8
"""So many blocks are measured, beginning with the first steady one."""
MOST_BLOCKS = 30
"""If no blocks agree among so many, the last ones are taken, and the result says that they are not steady."""
BLOCK_SECONDS = 0.5
"""About how long a block takes; the device is waited for at its end only."""
LEAST_STEPS, MOST_STEPS = 3, 1000
"""Bounds of the steps of a block."""
WARM_STEPS, FEW_WARM_STEPS, WARM_SECONDS = 8, 2, 10.0
"""Steps after the first that are not measured; only the smaller number if the larger one would take too long."""
NOTICED = 0.05
"""If the work waited for its input for a larger share of the time, it is measured without any input as well."""
LIMITED = 0.95
"""Below this share of the speed without input, the input is the limit."""


@dataclass(frozen=True)
class Spread:
    """A few numbers by their order."""

    median: float
    least: float
    lower_quartile: float
    upper_quartile: float
    most: float


def warm_steps(step_seconds: float) -> int:
    """How many steps to take before measuring."""
    return WARM_STEPS if WARM_STEPS * step_seconds <= WARM_SECONDS else FEW_WARM_STEPS


def block_steps(step_seconds: float) -> int:
    """How many steps a block has, so that waiting at its end costs next to nothing."""
    return max(LEAST_STEPS, min(MOST_STEPS, math.ceil(BLOCK_SECONDS / max(step_seconds, 1e-9))))


def sample_count(wanted: int, one_seconds: float, seconds: float) -> int:
    """How many of the wanted repeats fit so many seconds; ten in any case, if so many are wanted."""
    return min(wanted, max(10, int(seconds / max(one_seconds, 1e-9))))


def steady_from(blocks: Sequence[float]) -> int | None:
    """The first block of the first few in a row that agree, by their times; None if none do."""
    for start in range(len(blocks) - AGREEING + 1):
        few = blocks[start : start + AGREEING]
        if max(few) <= min(few) * (1 + WITHIN):
            return start
    return None


def is_measured(blocks: Sequence[float], seconds: float) -> bool:
    """Whether enough blocks are measured: all that count, or as many as fit so many seconds, but never too few."""
    start = steady_from(blocks)
    complete = start is not None and len(blocks) - start >= COUNTED
    return complete or len(blocks) >= MOST_BLOCKS or (len(blocks) >= AGREEING and sum(blocks) >= seconds)


def first_counted(blocks: Sequence[float]) -> int:
    """The first block that counts: the first steady one, or else the first of the last few."""
    start = steady_from(blocks)
    return max(0, len(blocks) - COUNTED) if start is None else start


def spread(values: Sequence[float]) -> Spread:
    """The median, the quartiles and the extremes of some numbers."""
    lower, upper = (_quantile(sorted(values), share) for share in (0.25, 0.75))
    return Spread(statistics.median(values), min(values), lower, upper, max(values))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile on the line between the two nearest numbers."""
    place = share * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    return below + (ordered[math.ceil(place)] - below) * (place - math.floor(place))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the numbers that at least so many percent of them do not exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def slowest(seconds: Sequence[Sequence[float]]) -> list[float]:
    """For each block the time of the slowest replica; rows are replicas."""
    return [max(block) for block in zip(*seconds, strict=True)]


def rates(images: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]]) -> list[float]:
    """For each block the images of all replicas divided by the time of the slowest; rows are replicas."""
    counts = [sum(block) for block in zip(*images, strict=True)]
    return [count / time for count, time in zip(counts, slowest(seconds), strict=True)]


def is_input_bound(rate: float, alone: float | None) -> bool:
    """Whether work would be faster without its input; `alone` is its speed without, if that was measured."""
    return alone is not None and rate < LIMITED * alone


def verdict(rate: float, waiting: float, alone: float | None) -> str | None:
    """One line if the input is the limit, else None; speeds are in images a second."""
    if alone is None or not is_input_bound(rate, alone):
        return None
    return (
        f"the input is the limit: {waiting:.0%} of the time was spent waiting for images; {rate:,.0f} images/s, and "
        f"{alone:,.0f} without any input; paceline bench data RECIPE --data FOLDER says what would help"
    )
