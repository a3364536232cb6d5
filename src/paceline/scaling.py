"""Predicts the time of a step on many devices: measured work, counted bytes, and links of a given speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planning import Plan

BACKWARD = 2 / 3
"""The backward pass's share of a micro-batch's time: two products for each one of the forward pass."""


@dataclass(frozen=True)
class Link:
    """What carries bytes from one place to another."""

    bytes_per_second: float
    latency: float = 0.0
    """Seconds until a message that was sent begins to arrive."""

    def turns(self, count: int, size: float) -> float:
        """Seconds for half an all-reduce of so many bytes around a ring of `count`: a reduce-scatter, or a gather."""
        return (count - 1) * (size / count / self.bytes_per_second + self.latency)


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices."""

    devices: int
    """Devices of each host."""
    inside: Link
    """What one device sends to its neighbor in the host, while it receives as much."""
    between: Link
    """What one host sends to the next one, while it receives as much; its devices share it."""

    def all_reduce(self, count: int, size: float) -> float:
        """Seconds in which `count` devices sum so many bytes each: scattered inside hosts, summed between, gathered."""
        return 2 * (
            self.inside.turns(min(count, self.devices), size)
            + self.between.turns(math.ceil(count / self.devices), size)
        )

    def all_gather(self, count: int, size: float) -> float:
        """Seconds in which `count` devices get so many bytes of each other one."""
        return self.all_reduce(count, count * size) / 2


@dataclass(frozen=True)
class Traffic:
    """Bytes that a replica exchanges."""

    gradients: int
    """All gradients, once per step."""
    statistics: int
    """Norm statistics of a step, with its loss and hits."""
    norms: int
    """Norm layers, each of which exchanges vectors if a norm group spans replicas."""
    vectors: int
    """Two numbers for each channel of all these layers."""


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, in seconds."""

    work: float
    exchange: float
    """Summing gradients and statistics."""
    exposed: float
    """As much of that as the backward pass does not hide."""
    norms: float
    """Distributed norm, which nothing hides."""

    @property
    def hidden(self) -> float:
        """The rest of the exchange; at least nothing, whatever rounding says."""
        return max(0.0, self.exchange - self.exposed)

    @property
    def total(self) -> float:
        return self.work + self.exposed + self.norms


def traffic(plan: Plan, parameters: int, norms: int, channels: int) -> Traffic:
    """The bytes that a step exchanges, for a network of so many trained parameters, norm layers and their channels."""
    width, sent = _widths(plan)
    pairs = 2 * width * channels if plan.norm_batch else 0
    return Traffic(sent * parameters, pairs + 2 * width, norms if plan.norm_batch else 0, pairs)


def step_time(plan: Plan, seconds_per_image: float, sent: Traffic, cluster: Cluster) -> StepTime:
    """The time of a step by the plan of that many replicas, one on each device."""
    micro_batch = plan.micro_batch * seconds_per_image
    count, (width, travels) = plan.replicas, _widths(plan)
    sizes = bucket_sizes(sent.gradients, plan.placement.bucket * travels // width)
    buckets = [(size, cluster.all_reduce(count, size)) for size in sizes]
    last = cluster.all_reduce(count, sent.statistics)
    norms = 0.0
    if plan.norm_replicas > 1:
        span, size = plan.norm_replicas, sent.vectors / max(1, sent.norms)
        norms = plan.rounds * sent.norms * (cluster.all_gather(span, size) + cluster.all_reduce(span, size))
    return StepTime(
        work=plan.rounds * micro_batch,
        exchange=sum(seconds for _, seconds in buckets) + last,
        exposed=exposed(buckets, BACKWARD * micro_batch) + last,
        norms=norms,
    )


def _widths(plan: Plan) -> tuple[int, int]:
    """Bytes of a number of a gradient, as it is computed and as it travels."""
    widths = {"fp64": 8, "fp32": 4, "bf16": 2}
    return 8 if plan.placement.precision == "fp64" else 4, widths[plan.placement.communication]


def bucket_sizes(gradients: int, bucket: int) -> list[int]:
    """The bytes that each bucket sends; real ones are a little larger, since a bucket never parts a parameter."""
    full, rest = divmod(gradients, max(1, bucket))
    return [bucket] * full + [rest] * (rest > 0)


def exposed(buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """Seconds that the last of the buckets, each of so many bytes and seconds, arrives after the backward pass.

    Gradients become complete at an even pace, and a bucket leaves when it is full and the one before has arrived. So
    the last one, which fills up at the very end, is never hidden.
    """
    total, full, arrived = sum(size for size, _ in buckets), 0.0, 0.0
    for size, seconds in buckets:
        full += size
        arrived = max(arrived, full / total * backward) + seconds
    return arrived - backward
