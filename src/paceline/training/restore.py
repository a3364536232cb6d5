"""Restoring: the first replica reads a checkpoint, checks that it fits, and gives it to all."""

from __future__ import annotations

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from torch import Tensor

from paceline import checkpoint
from paceline.errors import RunError
from paceline.record import Run, trained_step
from paceline.training.session import Session
from paceline.training.state import State, broadcast_state, initialize_state
from paceline.visible import plural


def restore_newest(session: Session) -> None:
    """Let the state be that of the newest intact checkpoint, or the initial one of a run that has not trained yet."""
    run, state, world = session.run, session.state, session.world
    newest = None
    with state.gathered():
        if world.first:
            newest = checkpoint.newest_intact(
                run.checkpoints, lambda fault: run.note(f"damaged, taking the one before it: {fault}", warning=True)
            )
            if newest is None:
                _check_untrained(run)
            else:
                _tell_lost(run, newest[0])
        if world.stages > 1:
            newest = world.broadcast_object(newest)  # each stage takes its part
        if world.first or world.stages > 1:
            if newest is not None:
                load_files(state, newest[1], checkpoint.name_of(newest[0]))
            elif adoption := initialize_state(state, session.plan):
                run.note(str(adoption))
        if world.first:
            checkpoint.clear_leftovers(run.checkpoints)
        broadcast_state(world, state)


def _tell_lost(run: Run, step: int) -> None:
    """Note that checkpoints are gone of which the record tells, and that steps are trained again for that."""
    told = max((row["step"] for row in run.rows() if row["kind"] == "checkpoint"), default=0)
    if told > max(checkpoint.saved_steps(run.checkpoints)):
        text = f"the checkpoint of step {told} is gone, of which the record tells; going on from step {step}"
        run.note(text, warning=True)


def _check_untrained(run: Run) -> None:
    """Refuse to train a run from the beginning whose checkpoints are damaged or gone.

    Nothing is trained before the checkpoint of step 0 is on disk, so a run that has trained had one.
    """
    rows = run.rows()
    if max([trained_step(rows), *checkpoint.saved_steps(run.checkpoints)]):
        raise RunError(
            f"{run.checkpoints}: no intact checkpoint is left of this run, which has trained "
            f"{plural(trained_step(rows), 'step')}; put its checkpoints back, or train it again in another folder "
            "with --out"
        )


def load_checkpoint(session: Session, step: int, files: checkpoint.CheckpointFiles | None) -> None:
    """Let every process's state be that of the checkpoint whose files the first one has read."""
    if session.world.stages > 1:
        files = session.world.broadcast_object(files)
    with session.state.gathered():
        if files is not None:
            load_files(session.state, files, checkpoint.name_of(step))
        broadcast_state(session.world, session.state)


def load_files(state: State, files: checkpoint.CheckpointFiles, where: str) -> State:
    """Load a checkpoint's content; names and shapes must be those of this network."""
    try:
        numbers = json.loads(files["state.json"])
        groups = {
            name.removesuffix(".safetensors"): tensors_from(content)
            for name, content in files.items()
            if name.endswith(".safetensors")
        }
        state.load_numbers(numbers)
    except (KeyError, ValueError, TypeError, IndexError, SafetensorError) as fault:
        raise RunError(f"{where}: not a checkpoint that this version reads: {fault}") from None
    for group, tensors in state.tensors().items():
        if group not in groups:
            recipe = ", and the recipe has an EMA (ema.decay)" if group == "ema" else ""
            raise RunError(
                f"{where}: '{group}.safetensors' is missing{recipe}: this checkpoint is of another recipe; to start "
                "from its weights, train a new run with init.from"
            )
        copy_tensors(state.network.own(groups[group]), tensors, where)
    return state


def give_network(session: Session, tensors: dict[str, Tensor], where: str) -> None:
    """Let every process's network be the one whose tensors by name the first one has."""
    world, network = session.world, session.state.network
    target = network.module.state_dict()
    if world.stages > 1:
        tensors = world.broadcast_object(tensors)
    if world.first or world.stages > 1:
        copy_tensors(network.own(tensors), target, where)
    world.broadcast(list(target.values()))


@torch.no_grad()
def copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor], where: str) -> None:
    """Copy tensors by name; names and shapes must be the same."""
    if source.keys() != target.keys():
        odd = min(source.keys() ^ target.keys())
        raise RunError(f"{where}: does not fit this network; '{odd}' is in only one of the two")
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            shapes = f"{tuple(source[name].shape)} instead of {tuple(tensor.shape)}"
            raise RunError(f"{where}: does not fit this network; '{name}' has the shape {shapes}")
        tensor.copy_(source[name])
