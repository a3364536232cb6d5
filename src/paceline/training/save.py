"""Saving: what a checkpoint holds, which ones stay on disk, and how an aborted step still ends saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from paceline import checkpoint
from paceline.errors import Broken, DataError, ReadFailed
from paceline.planning import Plan
from paceline.record import Row, best_step, json_text, judged_rows
from paceline.settings.duration import Duration
from paceline.settings.read import dump
from paceline.training.requests import Stopped
from paceline.training.session import Session
from paceline.training.state import State


def save(session: Session) -> None:
    """Write a checkpoint of this step, then remove those that need not stay."""
    run, state, plan = session.run, session.state, session.plan
    if not run.writes:
        return
    run.progress("saving", 0, 0)
    start = time.perf_counter()
    files = to_files(state) | {checkpoint.RECIPE: dump(plan.recipe).encode()}
    checkpoint.write(run.checkpoints, state.step, files)
    # Later steps than this one are damaged, or this run would have continued from them: they stay until the run has
    # saved the same step again, in case somebody can mend them.
    saved = checkpoint.saved_steps(run.checkpoints)
    earlier = [step for step in saved if step <= state.step]
    checkpoint.prune(run.checkpoints, to_keep(plan, earlier, judged_rows(run.folder)) | (set(saved) - set(earlier)))
    run.write(
        "checkpoint",
        step=state.step,
        epoch=plan.epoch(state.step),
        time=time.time(),
        bytes=sum(map(len, files.values())),
        seconds=time.perf_counter() - start,
    )


def to_files(state: State) -> checkpoint.CheckpointFiles:
    """The content of a checkpoint: each group of tensors as safetensors, everything else as JSON."""
    files = {f"{group}.safetensors": safetensors_bytes(_on_host(t)) for group, t in state.tensors().items()}
    return files | {"state.json": json_text(state.numbers()).encode()}


def to_keep(plan: Plan, saved: list[int], rows: list[Row]) -> set[int]:
    """The newest few, those that the end averages, the best one, and the first of each stretch of `keep_every`."""
    placement = plan.placement
    keep = set(saved[-placement.keep_last :]) | (set(plan.averaged_steps) & set(saved))
    best = best_step(rows, saved, plan.recipe.stop)
    if placement.keep_best and best is not None:
        keep.add(best)
    if placement.keep_every is not None:
        keep |= _firsts(plan, placement.keep_every, saved, rows)
    return keep


def _firsts(plan: Plan, every: Duration, saved: list[int], rows: list[Row]) -> set[int]:
    """The first checkpoint of each stretch of the training, or of the time since the run began.

    What was saved a moment ago has no row yet, and so no time; it stays as the newest one.
    """
    if every.seconds is None:
        stretch = plan.images_in(every)
        stretches = {step: int(step * plan.global_batch // stretch) for step in saved}
    else:
        times = {row["step"]: row["time"] for row in reversed(rows) if row["kind"] == "checkpoint" and "time" in row}
        began = min(times.values(), default=0.0)
        stretches = {step: int((times[step] - began) // every.seconds) for step in saved if step in times}
    firsts: dict[int, int] = {}
    for step, number in stretches.items():
        firsts.setdefault(number, step)
    return set(firsts.values())


@contextmanager
def saved_if_aborted(session: Session) -> Iterator[None]:
    """If a step or validation is aborted, save the state from before it and raise the fault again.

    On the CPU, replicas exchange everything before the state changes, so a step is done whole or not at all. An
    accelerator may have gone on with what it did not get: replicas there return to the last checkpoint.
    """
    try:
        yield
    except (ReadFailed, DataError, Stopped):
        save(session)
        raise
    except Broken:
        if session.plan.replicas == 1 or session.plan.placement.device == "cpu":
            save(session)
        raise


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in plain memory order, which is what safetensors stores."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
