"""Checkpoints of a run that may still be training: chosen late, read by the first replica, and given to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline import checkpoint
from paceline.errors import RunError
from paceline.training.state import State, restore
from paceline.world import World

Saved = dict[str, bytes]
"""The files of a checkpoint."""
Tell = Callable[[str], None]

AGAIN = 20
"""How often checkpoints are chosen anew because a run that trains has removed one in the meantime."""


def removed(folder: Path, steps: list[int]) -> bool:
    """Whether a checkpoint that was there when it was chosen is gone."""
    return not all((folder / checkpoint.name_of(step)).is_dir() for step in steps)


def first_whole(folder: Path, choose: Callable[[], list[int]], tell: Tell) -> tuple[int, Saved]:
    """The first undamaged checkpoint of those chosen; once one of them is gone, they are chosen anew."""
    tried: dict[int, RunError] = {}
    for _ in range(AGAIN):
        tried = {}
        for step in choose():
            try:
                files = checkpoint.read(folder / checkpoint.name_of(step))
            except RunError as fault:
                if removed(folder, [step]):
                    break
                tried[step] = fault
            else:
                for passed_over in tried.values():
                    tell(f"passed over: {passed_over}")
                return step, files
        else:
            break
    if not tried:
        raise RunError(f"{folder}: checkpoints are removed before they can be read; train with a larger on.keep_last")
    others = [str(step) for step in checkpoint.saved_steps(folder) if step not in tried]
    advice = f"choose another with --checkpoint: {', '.join(others)}" if others else "no other one is whole"
    raise RunError(f"{next(iter(tried.values()))}; {advice}")


def give(world: World, state: State, step: int, files: Saved | None) -> int:
    """Let every replica's network, and its moving average, be those of the checkpoint that the first has read."""
    if files is not None:
        restore(state, files, checkpoint.name_of(step))
    world.broadcast([*state.network.module.state_dict().values()])
    world.broadcast([*state.average.tensors().values()] if state.average else [])
    state.step = world.broadcast_object(step)
    return state.step
