"""One start of a run, from joining the other replicas to the last row of its record."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from paceline import checkpoint
from paceline.data.inspect.check import Watch
from paceline.data.load.loader import open_loader
from paceline.errors import INTERRUPTED, Broken, RunError, UserError
from paceline.launch import OURS, Launch
from paceline.machine import Machine
from paceline.planning import Plan
from paceline.record import Run, start_row
from paceline.sink import Several, Sink
from paceline.sink.console import Terminal
from paceline.sink.csv import Csv
from paceline.training.advice import Advice
from paceline.training.averaging import conclude
from paceline.training.loop import train
from paceline.training.messages import say_goodbye, say_hello, too_large
from paceline.training.requests import Requests, Signals, Stopped
from paceline.training.state import State, begin, fresh, restore
from paceline.world import World, init_world


def work(plan: Plan, launch: Launch | None, machine: Machine, folder: Path, data: Path | None, console: Console) -> int:
    """Train or go on training in a run folder; gives the exit status."""
    settle_torch(plan)
    world = init_world(plan, launch)
    run = Run(folder, writer=world.first)
    with Signals() as signals:
        try:
            status = _train(plan, world, run, machine, data, console, signals)
        except (UserError, torch.OutOfMemoryError) as fault:
            told = fault if isinstance(fault, UserError) else Broken(too_large(plan))
            _note_failure(run, told)
            raise told from None
        finally:
            run.close()
        world.barrier()  # a launcher may stop the others once one has left, and the first may still be writing
        world.close()
    return status


def settle_torch(plan: Plan) -> None:
    """Threads, exactness and determinism of this process, as the placement says."""
    placement = plan.placement
    assert isinstance(placement.cpu_threads, int)
    torch.set_num_threads(placement.cpu_threads)
    torch.backends.cuda.matmul.allow_tf32 = placement.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = placement.precision == "tf32"
    torch.backends.cudnn.benchmark = not placement.deterministic
    if placement.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _train(
    plan: Plan, world: World, run: Run, machine: Machine, data: Path | None, console: Console, signals: Signals
) -> int:
    before = run.rows()
    state = take_up(plan, world, run, console)
    ended = not before or any(row["kind"] == "end" for row in before)
    if state.step >= plan.steps and world.broadcast_object(ended):
        if world.first:
            console.print(
                f"This run is complete: {plan.steps} steps are trained. {run.folder}", markup=False, soft_wrap=True
            )
        return 0
    loader = open_loader(plan, data, world.replica, world.device, run.folder)
    seconds = plan.placement.save
    requests = Requests(world, signals, float(seconds.amount) if seconds.unit == "seconds" else None)
    if run.writer:
        say_hello(plan, run, state, console)
        start = run.write("start", **start_row(plan, machine, state.step, before))
        for key, (old, new) in start["arithmetic_changed"].items():
            console.print(f"on.{key} was {old} and is {new}: rounding changes from here on", soft_wrap=True)
    run.log(f"start at step {state.step} of {plan.steps}")
    with ExitStack() as stack:
        sink = Sink()
        if world.first:
            terminal = stack.enter_context(Terminal(plan, state.step, console))
            advice = Advice(Watch(plan, data, machine.cores), run, console)
            sink = Several(terminal, Csv(run.folder, before, state.step), advice)
        done = False
        with suppress(Stopped):
            done = train(plan, world, run, state, loader, sink, requests)
        requests.drain()
    if done:
        conclude(plan, world, run, state, loader)
    run.write("end" if done else "interrupted", step=state.step)
    run.log(f"{'end' if done else 'interrupted'} at step {state.step}")
    if world.first:
        say_goodbye(plan, run, state.step, done, console)
    if not done and OURS in os.environ:
        if world.first:
            Path(os.environ[OURS], "interrupted").touch()
        return 0
    return 0 if done else INTERRUPTED


def take_up(plan: Plan, world: World, run: Run, console: Console | None = None) -> State:
    """The newest whole checkpoint, or initial weights; the first replica reads and gives it to all."""
    state = fresh(plan, world)
    if world.first:
        checkpoint.clear_leftovers(run.checkpoints)
        for step, found in checkpoint.newest(run.checkpoints):
            if isinstance(found, RunError):
                if console:
                    console.print(
                        f"[yellow]damaged, taking the one before it:[/yellow] {escape(str(found))}", soft_wrap=True
                    )
                run.log(f"damaged checkpoint: {found}")
            else:
                restore(state, found, checkpoint.name_of(step))
                break
        else:
            adopted = begin(state, plan)
            if adopted:
                run.log(str(adopted))
                if console:
                    console.print(str(adopted), soft_wrap=True, markup=False)
    counters = torch.tensor([state.step, state.reported], device=world.device)
    world.broadcast([*state.network.module.state_dict().values(), *state.optimizer.tensors().values()])
    world.broadcast([*state.average.tensors().values()] if state.average else [])
    world.broadcast([state.tally, state.last, state.bad])
    world.broadcast([state.scale.value, state.scale.good_steps, counters])
    state.step, state.reported = counters.tolist()
    return state


def _note_failure(run: Run, fault: UserError) -> None:
    """Leave the reason in the record if the disk still takes it."""
    try:
        run.write("failed", why=str(fault))
        run.log(f"failed: {fault}")
    except Broken:
        return
