"""How fast a plan trains here: the steps of an open session, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from paceline.data.load.batches import MicroBatch
from paceline.errors import Broken
from paceline.job import Job
from paceline.progress import progress_bar
from paceline.stages import idle_share
from paceline.training.profiling import profile_work
from paceline.training.restore import restore_newest
from paceline.training.run import out_of_memory
from paceline.training.session import Session, open_session
from paceline.training.step import take_step
from paceline.training.stopwatch import Fed, measure_fed, over_replicas, wait_for

TIMED_STEPS = 3
"""Steps of a pipeline whose passes are timed one by one, which takes time itself."""


def bench_train(
    job: Job, folder: Path, *, began: float, steps: int | None, seconds: float, profile: str | None
) -> dict[str, Any]:
    """Time the steps of a plan in a new run folder.

    `began` is when the command did, `steps` the number of steps in a block, `seconds` how long to measure at most, and
    `profile` the folder for a trace.
    """
    with open_session(
        job.plan, folder, data_folder=job.data_folder, launch=job.launch, quarantine=folder
    ) as session, memory_faults(out_of_memory(job.plan)), progress_bar(session.world.first) as progress:  # fmt: skip
        restore_newest(session)
        with closing(session.loader.training(0)) as batches:
            fed = Fed(batches, lambda one: _take(session, one))
            fed.step()
            wait_for(session.world.device)
            first = time.time() - began
            result = measure_fed(session.world, fed, steps, seconds, progress)
            result |= memory_peaks(session)
            result["idle_share"] = idle_shares(session, fed.step)
            result["first_step_seconds"] = max(row[0] for row in over_replicas(session.world, [first]))
            result["profile"] = None
            if profile is not None:
                result["profile"] = profile_work(session, fed.step, Path(profile), result["ms_per_step"])
        return result


def _take(session: Session, batches: list[MicroBatch]) -> int:
    take_step(session, batches)
    return sum(batch.count for batch in batches)


def idle_shares(session: Session, step: Callable[[], object]) -> dict[str, Any] | None:
    """The share of a few steps' passes in which the stages of a pipeline wait: of each, and predicted; else None."""
    plan, world, network = session.plan, session.world, session.state.network
    if plan.stages == 1:
        return None
    from paceline.model.staged import Staged  # noqa: PLC0415 - torch's pipelining is slow to import

    assert isinstance(network, Staged)
    with network.timed() as times:
        for _ in range(TIMED_STEPS):
            step()
    wait_for(world.device)
    rows = over_replicas(world, [*times.seconds()])
    longest = max(steps for steps, _ in rows)
    stages = [rows[stage :: plan.stages] for stage in range(plan.stages)]
    shares = [1 - fmean(passes for _, passes in replicas) / longest for replicas in stages]
    return {"measured": fmean(shares), "of_each": shares, "predicted": idle_share(plan)}


@contextmanager
def memory_faults(message: str) -> Iterator[None]:
    """Say what to write if the device's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise Broken(message) from None


def memory_peaks(session: Session) -> dict[str, int | None]:
    """The most memory that any replica's device has held so far, in bytes: in tensors, and by torch; None on a CPU."""
    if session.world.device.type != "cuda":
        return {"peak_memory": None, "reserved_memory": None}
    peaks = [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]
    allocated, reserved = (int(max(column)) for column in zip(*over_replicas(session.world, peaks), strict=True))
    return {"peak_memory": allocated, "reserved_memory": reserved}
