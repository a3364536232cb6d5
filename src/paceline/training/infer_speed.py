"""How fast a network evaluates images here, by batch size: latency of one batch alone, and images a second of many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.load.batches import MicroBatch
from paceline.data.load.loader import Loader
from paceline.device import pinned
from paceline.job import Job
from paceline.model.init import initialize, published
from paceline.model.whole import Whole
from paceline.progress import Progress, progress_bar
from paceline.settings.model import External
from paceline.training import timing
from paceline.training.opened import load_evaluated
from paceline.training.profiling import profile_work
from paceline.training.session import Session, open_session
from paceline.training.stopwatch import Fed, measure_fed, over_replicas, wait_for
from paceline.training.train_speed import memory_faults, memory_peaks

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def bench_infer(
    job: Job, folder: Path, *, began: float, run: str | None, which: str | None, batches: list[int], repeats: int,
    seconds: float, loaded: bool, profile: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Time the network of a plan on each batch size, and with `loaded` a validation as the loader feeds it.

    `run` is the folder that weights come from, at its checkpoint `which`; without one they are random. No latency and
    no speed is measured for longer than `seconds`, if it can be helped. `profile` is the folder for a trace of the last
    size.
    """
    with open_session(
        job.plan, folder, data_folder=job.data_folder, launch=job.launch, quarantine=folder
    ) as session, progress_bar(session.world.first) as progress:  # fmt: skip
        network = Whole(session.plan, session.world)
        step = _set_weights(network, None if run is None else Path(run), which)
        images = _some_images(session.loader, max(batches))
        rows = []
        for size in batches:
            with memory_faults(f"out of memory at a batch of {size}; write smaller ones with --batch"):
                rows.append(_measure(session, network, images[:size], repeats, seconds, progress))
        first = time.time() - began - sum(row.pop("seconds") for row in rows) + rows[0]["first_seconds"]
        return {
            "checkpoint": step,
            "first_batch_seconds": max(row[0] for row in over_replicas(session.world, [first])),
            **memory_peaks(session),
            "batches": rows,
            "loaded": _measure_loaded(session, network, seconds, progress) if loaded else None,
            "profile": _profile(session, network, images[: batches[-1]], profile, rows[-1]["ms_per_step"]),
        }


def _set_weights(network: Whole, run: Path | None, which: str | None) -> int | None:
    """Give the network the weights that a run would be evaluated with, or initial ones; gives the run's step."""
    plan = network.plan
    if run is None:
        if not isinstance(plan.recipe.model, External):
            initialize(network.module, published(plan.recipe.init, plan.recipe.model), plan.recipe.seed)
        return None
    return load_evaluated(run, which, network.module.state_dict())


def _some_images(loader: Loader, count: int) -> Tensor:
    """Validation images [images, channels, side, side] in the host's memory, 8 bits; few are repeated."""
    some: list[Tensor] = []
    with closing(_endless(loader)) as batches:
        while sum(map(len, some)) < count:
            batch = next(batches)
            some.append(batch.images[: batch.count].cpu())
    return torch.cat(some)[:count]


def _endless(loader: Loader) -> Generator[MicroBatch, None, None]:
    """This replica's validation images again and again."""
    while True:
        with closing(loader.validation()) as batches:
            yield from batches


def _measure(
    session: Session, network: Whole, images: Tensor, repeats: int, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Latency and speed of one batch size."""
    device, begin = session.world.device, time.perf_counter()
    if session.plan.placement.compile:
        torch.compiler.reset()  # else the second size would be compiled for sizes of all kinds, which is slower
    host = pinned(images.contiguous(memory_format=torch.channels_last), device)

    def answer() -> float:
        start = time.perf_counter()
        _scores(network, host.to(device, non_blocking=True)).cpu()
        return time.perf_counter() - start

    wait_for(device)
    first = answer()
    warm = [answer() for _ in range(timing.FEW_WARM_STEPS)]
    slowest = max(row[0] for row in over_replicas(session.world, [warm[-1]]))
    for _ in range(timing.warm_steps(slowest) - timing.FEW_WARM_STEPS):
        answer()
    count = timing.sample_count(repeats, slowest, seconds)
    times = [1000 * each for row in over_replicas(session.world, [answer() for _ in range(count)]) for each in row]
    resident = host.to(device)
    fed = Fed(itertools.repeat(resident), lambda batch: len(_scores(network, batch)))
    speed = measure_fed(session.world, fed, None, seconds, progress)
    return {
        "batch": len(images),
        "repeats": len(times),
        "latency_ms": {name: timing.percentile(times, percent) for name, percent in PERCENTILES.items()},
        "latency_ms_mean": sum(times) / len(times),
        **{key: speed[key] for key in _SPEED},
        "first_seconds": first,
        "seconds": time.perf_counter() - begin,
    }


_SPEED = (
    "images_per_second", "images_per_second_spread", "ms_per_step", "steady", "blocks", "block_steps", "replica_blocks",
)  # fmt: skip


def _profile(
    session: Session, network: Whole, images: Tensor, folder: str | None, step_ms: float
) -> dict[str, Any] | None:
    if folder is None:
        return None
    resident = images.contiguous(memory_format=torch.channels_last).to(session.world.device)
    return profile_work(session, lambda: _scores(network, resident), Path(folder), step_ms)


@torch.inference_mode()
def _scores(network: Whole, images: Tensor) -> Tensor:
    """Class scores of 8-bit images on the device, as a validation computes them."""
    return network.scores(images)


def _measure_loaded(session: Session, network: Whole, seconds: float, progress: Progress) -> dict[str, Any]:
    """The speed of validation batches as they come from the loader."""

    def evaluate(batch: MicroBatch) -> int:
        network.answers(batch)
        return batch.count

    with closing(_endless(session.loader)) as batches:
        speed = measure_fed(session.world, Fed(batches, evaluate), None, seconds, progress)
    return {"batch": session.plan.evaluation_batch, **speed}
