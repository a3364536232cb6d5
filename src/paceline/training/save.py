"""Saving: what is written and told, which checkpoints stay on disk, and how an aborted step still ends saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from paceline import checkpoint
from paceline.errors import Broken, DataError, NotSaved, ReadFailed, RunError
from paceline.planning import Plan
from paceline.record import Row, Run, best_step
from paceline.settings.duration import Duration
from paceline.settings.read import dump
from paceline.training.requests import Stopped
from paceline.training.saver import LeftOut, Saver, Snapshot, Written, take_snapshot
from paceline.training.session import Session
from paceline.training.state import State


def save(session: Session) -> None:
    """Copy the state; a thread writes the checkpoint while training goes on, and removes those that need not stay."""
    run, state = session.run, session.state
    with state.gathered(keep=session.world.replica == 0):
        if not run.writes and session.plan.stages == 1:
            return
        snapshot = take_snapshot(state)
    if not run.writes:  # the first process has what this one gave
        return
    if session.saver is None:
        session.saver = open_saver(session)
    session.saver.take(snapshot)
    tell_saved(session)


def open_saver(session: Session) -> Saver:
    """What writes the checkpoints of a session; those that the end averages are never left out."""
    return Saver(partial(_write, session.run, session.plan, []), frozenset(session.plan.averaged_steps))


def tell_saved(session: Session) -> None:
    """Write down what has become of checkpoints by now; a disk that does not take one does not end the training."""
    run, saver = session.run, session.saver
    if saver is None:
        return
    for outcome in saver.ended():
        match outcome:
            case Written(row, kept):
                saver.fault = None
                run.write("checkpoint", **row)
                if kept:
                    run.note(f"checkpoints that need not stay could not be removed: {kept}", warning=True)
            case LeftOut(step):
                run.note(
                    f"no checkpoint of step {step}: the disk was still busy with the one before when the next was due; "
                    "write a longer on.save",
                    warning=True,
                )
            case Broken() if session.state.step == 0:
                raise NotSaved(f"{outcome}; make room, and run the same command again")
            case Broken():
                saver.fault = outcome
                run.note(f"{outcome}; training goes on, and saves again when that is due", warning=True)
            case _:
                raise outcome


def finish_saving(session: Session) -> None:
    """Wait until what was saved last is on disk, and refuse to go on if it is not."""
    if session.saver is None:
        return
    session.run.progress("saving", 0, 0)
    session.saver.join()
    tell_saved(session)
    if session.saver.fault:
        raise NotSaved(f"{session.saver.fault}; make room, and run the same command again to go on from there")


@contextmanager
def tolerating_full_disk(run: Run) -> Iterator[None]:
    """If the disk does not take what is written inside, say so and go on."""
    try:
        yield
    except Broken as fault:
        run.note(f"{fault}; training goes on", warning=True)


def _write(run: Run, plan: Plan, rows: list[Row], snapshot: Snapshot) -> Written:
    """Write a checkpoint, then remove those that need not stay.

    `rows` are those of this start's checkpoints: the thread that trains may not have written them down yet.
    """
    start = time.perf_counter()
    files = snapshot.files() | {checkpoint.RECIPE: dump(plan.recipe).encode()}
    checkpoint.write(run.checkpoints, snapshot.step, files)
    row = {
        "step": snapshot.step,
        "epoch": plan.epoch(snapshot.step),
        "time": time.time(),
        "bytes": sum(map(len, files.values())),
        "seconds": snapshot.seconds + time.perf_counter() - start,
        "held_seconds": snapshot.seconds,
    }
    try:
        _prune(run, plan, rows, snapshot.step)
    except RunError as fault:
        return Written(row, fault)
    except OSError as fault:
        return Written(row, Broken(f"{fault.filename}: {fault.strerror}"))
    finally:
        rows.append({"kind": "checkpoint", **row})
    return Written(row)


def _prune(run: Run, plan: Plan, rows: list[Row], step: int) -> None:
    """Remove the checkpoints that need not stay beside the one that was just written.

    Later steps than this one are damaged, or this run would have continued from them: they stay until the run has
    saved the same step again, in case somebody can mend them.
    """
    rows = run.judged_rows() + rows
    saved = checkpoint.saved_steps(run.checkpoints)
    earlier = [each for each in saved if each <= step]
    checkpoint.prune(run.checkpoints, to_keep(plan, earlier, rows) | (set(saved) - set(earlier)))


def to_files(state: State) -> checkpoint.CheckpointFiles:
    """The content of a checkpoint of the state as it is."""
    return take_snapshot(state).files()


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
    """If a step or validation is aborted, save the state from before it, and raise the fault again once that is done.

    On the CPU, replicas exchange everything before the state changes, so a step is done whole or not at all. An
    accelerator may have gone on with what it did not get: replicas there return to the last checkpoint. So do a
    pipeline and replicas that keep shares of the state, which cannot be saved without one of them.
    """
    plan = session.plan
    try:
        yield
    except Stopped as fault:  # in all processes
        if plan.stages == 1:
            _save_after(session, fault)
        raise
    except (ReadFailed, DataError) as fault:
        if not plan.parts_state:
            _save_after(session, fault)
        raise
    except Broken as fault:
        if plan.processes == 1 or (plan.placement.device == "cpu" and not plan.parts_state):
            _save_after(session, fault)
        raise


def _save_after(session: Session, fault: Exception) -> None:
    save(session)
    try:
        finish_saving(session)
    except NotSaved as unsaved:
        raise NotSaved("; ".join(filter(None, (str(fault), str(unsaved))))) from None
