"""Which checkpoints stay on disk, and when a run of bad steps is ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline import checkpoint
from paceline.errors import Broken, DataError, ReadFailed
from paceline.planning import Plan
from paceline.record import Row, Run, best_step
from paceline.training.reports import longest_row
from paceline.training.requests import Stopped
from paceline.training.state import State, to_files

NOT_FINITE = "a gradient or a statistic of a norm was not finite"
"""What makes a step bad."""


def save(plan: Plan, run: Run, state: State) -> None:
    """Write a checkpoint of this step, then remove those that need not stay."""
    if not run.writer:
        return
    checkpoint.write(run.checkpoints, state.step, to_files(state))
    # Later steps than this one are damaged, or this run would have gone on from them.
    saved = [step for step in checkpoint.saved_steps(run.checkpoints) if step <= state.step]
    checkpoint.prune(run.checkpoints, to_keep(plan, saved, run.rows()))


def to_keep(plan: Plan, saved: list[int], rows: list[Row]) -> set[int]:
    """The newest few, those the end averages, the best judged one, and one of each stretch that `keep_every` names."""
    placement = plan.placement
    keep = set(saved[-placement.keep_last :]) | (set(plan.averaged_steps) & set(saved))
    best = best_step(rows, saved)
    if placement.keep_best and best is not None:
        keep.add(best)
    if placement.keep_every is not None:
        stretch = plan.images_in(placement.keep_every)
        firsts: dict[int, int] = {}
        for step in saved:
            firsts.setdefault(int(step * plan.global_batch // stretch), step)
        keep |= set(firsts.values())
    return keep


@contextmanager
def saved_if_cut_off(plan: Plan, run: Run, state: State) -> Iterator[None]:
    """End saved, as it was before the step or validation whose images cannot be read, of which too many are damaged, in
    which a signal came, or where another replica left.

    On the CPU, what replicas exchange comes before anything of the state changes, so that a step is done whole or not
    at all. An accelerator may have gone on with what it did not get: replicas there go back to the last checkpoint.
    """
    try:
        yield
    except (ReadFailed, DataError, Stopped):
        save(plan, run, state)
        raise
    except Broken:
        if plan.replicas == 1 or plan.placement.device == "cpu":
            save(plan, run, state)
        raise


def heed_bad_steps(plan: Plan, run: Run, state: State, row: Row) -> None:
    """End a run, saved, whose recipe does not want bad steps, or which has nothing but bad ones any more."""
    recipe, found = plan.recipe, row["bad_steps_in_a_row"]
    if recipe.on_bad_step == "stop" and found:
        first = row["first_bad_step"]
        what = f"step {first} was bad ({NOT_FINITE}), and on_bad_step is stop"
    elif found >= recipe.bad_steps_in_a_row:
        first = longest_row(state.bad_steps(), 0)[0]
        what = f"{found} steps in a row were bad ({NOT_FINITE})"
    else:
        return
    save(plan, run, state)
    raise Broken(f"{what}; look into it with: paceline repeat {run.folder} --step {first}")
