"""Fits the model of `paceline plan --hosts` to published scaling, and prints its errors on what the fit has not seen.

The split was chosen before any error was computed, though the figures were known: ResNet-50 on Bow Pods of 16, 64 and
256 devices is fitted, and every other published throughput of 16 to 256 devices is kept out: EfficientNet-B4 on the
same Pods, ResNet-50 on the older Pods, and GPUs. Three figures determine three numbers: a device's time for one
micro-batch, the speed at which a device exchanges gradients inside a rack, and the speed at which a rack exchanges them
with others. Each curve that is kept out starts from its own smallest published figure, as `--measured` does; the links
of GPUs are those of their data sheets.

    python benchmarks/fit_scaling.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from paceline.model import tables
from paceline.scaling import BACKWARD, Cluster, Link, bucket_sizes, exposed

BUCKET = 25 << 20
"""Bytes of gradients that leave together."""
RACK = 64
"""Devices of a Pod that are linked directly; between racks, gradients go through a gateway."""
LATENCY = 250e-9
"""Seconds, as published for the links in a rack; that between racks was not published, and is taken as none."""


@dataclass(frozen=True)
class Published:
    """A published throughput, and the layout that gave it."""

    network: str
    system: str
    devices: int
    images_per_second: float
    global_batch: int
    micro_batch: int
    stages: int = 1
    """Devices of one replica, which pass micro-batches on like a pipeline."""

    @property
    def replicas(self) -> int:
        return self.devices // self.stages

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.global_batch / self.images_per_second

    @property
    def turns(self) -> int:
        """Micro-batches of a replica in a step, and those of the time in which a pipeline fills and empties."""
        return self.global_batch // self.micro_batch // self.replicas + self.stages - 1

    def gradients(self, width: int) -> int:
        """Bytes of all gradients; the Pods' EfficientNet has groups of 16, and 0.1 % fewer parameters."""
        return width * tables.member(self.network).parameters


FITTED = [
    Published("resnet50", "Bow Pod", 16, 42029, 1920, 20),
    Published("resnet50", "Bow Pod", 64, 145287, 2560, 20),
    Published("resnet50", "Bow Pod", 256, 425514, 10240, 20),
]
ON_PODS = [
    (
        Published("efficientnet-b4", "Bow Pod", 16, 8936, 6144, 3, stages=2),
        [
            Published("efficientnet-b4", "Bow Pod", 64, 34943, 6144, 3, stages=2),
            Published("efficientnet-b4", "Bow Pod", 256, 117641, 6144, 3, stages=2),
        ],
    ),
    (
        Published("resnet50", "IPU-POD", 16, 30_000, 3200, 20),
        [Published("resnet50", "IPU-POD", 256, 12 * 30_000, 10240, 20)],  # "12 times" is all that is published
    ),
]
ON_GPUS = [
    (
        Published("efficientnet-b4", "A100-80", 1, 331, 128, 128),
        Published("efficientnet-b4", "A100-80", 64, 18900, 64 * 128, 128),
        Cluster(8, Link(300e9), Link(8 * 25e9)),  # NVLink 3 in one direction; eight adapters of 200 Gb/s
    ),
    (
        Published("resnet50", "V100", 1, 1376, 192, 192),  # 16 GB; the host of 16 has V100s of 32 GB
        Published("resnet50", "V100", 16, 21484, 16 * 256, 256),
        Cluster(16, Link(150e9), Link(25e9)),  # NVLink 2 in one direction; one host
    ),
]


def pod(inside: float, between: float, stages: int = 1) -> Cluster:
    """Racks whose replicas are of so many devices; each of these exchanges its own stage, at the same time."""
    return Cluster(RACK // stages, Link(inside * stages, LATENCY), Link(between))


def exchange(published: Published, inside: float, between: float) -> float:
    """The time of an all-reduce of 16-bit gradients, which in these systems follows the backward pass."""
    cluster = pod(inside, between, published.stages)
    return cluster.all_reduce(published.replicas, published.gradients(2))


def fit() -> tuple[float, float, float]:
    """Seconds for a micro-batch, and bytes per second of a device in its rack and of a rack: linear in 1 / each."""
    never = float("inf")
    rows, right = [], []
    for row in FITTED:
        latency = exchange(row, never, never)
        rows.append([row.turns, exchange(row, 1, never) - latency, exchange(row, never, 1) - latency])
        right.append(row.seconds - latency)
    micro_batch, inside, between = np.linalg.lstsq(np.array(rows), np.array(right), rcond=None)[0]
    return float(micro_batch), float(1 / inside), float(1 / between)


def on_pods(first: Published, later: Published, inside: float, between: float) -> float:
    """Images per second of a larger Pod, by the smallest one of the same network."""
    micro_batch = (first.seconds - exchange(first, inside, between)) / first.turns
    return later.global_batch / (later.turns * micro_batch + exchange(later, inside, between))


def on_gpus(first: Published, later: Published, cluster: Cluster) -> float:
    """Images per second of many GPUs by that of one, with float32 gradients that leave in the backward pass."""
    micro_batch = first.seconds * later.micro_batch / first.micro_batch
    buckets = [(size, cluster.all_reduce(later.devices, size)) for size in bucket_sizes(later.gradients(4), BUCKET)]
    return later.global_batch / (later.turns * micro_batch + exposed(buckets, BACKWARD * micro_batch))


def report() -> dict[str, object]:
    micro_batch, inside, between = fit()
    rows = [(row, on_pods(FITTED[0], row, inside, between), "fitted") for row in FITTED]
    for first, larger in ON_PODS:
        rows += [(row, on_pods(first, row, inside, between), "kept out") for row in larger]
    rows += [(later, on_gpus(first, later, cluster), "kept out") for first, later, cluster in ON_GPUS]
    return {
        "ms_per_micro_batch": round(1e3 * micro_batch, 3),
        "inside_gigabytes_per_second": round(inside / 1e9, 1),
        "between_gigabytes_per_second": round(between / 1e9, 1),
        "rows": [
            {
                "network": row.network, "system": row.system, "devices": row.devices,
                "published": round(row.images_per_second), "predicted": round(rate),
                "error": f"{rate / row.images_per_second - 1:+.1%}", "part": part,
            }
            for row, rate, part in rows
        ],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(report(), indent=1))
