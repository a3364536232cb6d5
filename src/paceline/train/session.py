"""One start of a run, from joining the other replicas to the last row of its record."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from paceline import checkpoint
from paceline.data.doctor import Watch
from paceline.data.encoded import QUARANTINE, listed
from paceline.data.loader import open_loader
from paceline.errors import INTERRUPTED, Broken, RunError, UserError
from paceline.launch import OURS, Launch
from paceline.machine import Machine
from paceline.plan import Plan
from paceline.record import Row, Run, latest, start_row
from paceline.sink import Several, Sink
from paceline.sink.console import Terminal
from paceline.sink.csv import Csv
from paceline.train.advice import Advice
from paceline.train.average import conclude
from paceline.train.loop import train
from paceline.train.state import State, begin, fresh, restore
from paceline.train.wishes import Signals, Wishes
from paceline.world import World, join


def work(plan: Plan, launch: Launch | None, machine: Machine, folder: Path, data: Path | None, console: Console) -> int:
    """Train or go on training in a run folder; gives the exit status."""
    settle_torch(plan)
    world = join(plan, launch)
    signals = Signals()
    signals.listen()
    run = Run(folder, writer=world.first)
    try:
        status = _train(plan, world, run, machine, data, console, signals)
    except (UserError, torch.OutOfMemoryError) as fault:
        told = fault if isinstance(fault, UserError) else Broken(_too_large(plan))
        _note_failure(run, told)
        raise told from None
    finally:
        run.close()
    world.wait_for_all()  # a launcher may stop the others once one has left, and the first may still be writing
    world.close()
    return status


def settle_torch(plan: Plan) -> None:
    """Threads, exactness and determinism of this process, as the placement says."""
    placement = plan.placement
    assert isinstance(placement.cpu_threads, int)
    torch.set_num_threads(placement.cpu_threads)
    torch.backends.cuda.matmul.allow_tf32 = placement.precision == "tf32.32"
    torch.backends.cudnn.allow_tf32 = placement.precision == "tf32.32"
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
    if state.step >= plan.steps and world.agree([int(ended)])[0]:
        if world.first:
            console.print(
                f"This run is complete: {plan.steps} steps are trained. {run.folder}", markup=False, soft_wrap=True
            )
        return 0
    loader = open_loader(plan, data, world.replica, world.device, run.folder)
    seconds = plan.placement.save
    wishes = Wishes(world, signals, float(seconds.amount) if seconds.unit == "seconds" else None)
    if run.writer:
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
        done = train(plan, world, run, state, loader, sink, wishes)
    if done:
        conclude(plan, world, run, state, loader)
    run.write("end" if done else "interrupted", step=state.step)
    run.log(f"{'end' if done else 'interrupted'} at step {state.step}")
    if world.first:
        _say_goodbye(plan, run, state.step, done, console)
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
    world.spread([*state.network.module.state_dict().values(), *state.optimiser.tensors().values()])
    world.spread([*state.average.tensors().values()] if state.average else [])
    world.spread([state.tally, state.last, state.bad_steps, state.last_good, state.last_bad])
    world.spread([state.scale.value, state.scale.good_steps, counters])
    state.step, state.reported = counters.tolist()
    return state


def _note_failure(run: Run, fault: UserError) -> None:
    """Leave the reason in the record if the disk still takes it."""
    try:
        run.write("failed", why=str(fault))
        run.log(f"failed: {fault}")
    except Broken:
        return


def _too_large(plan: Plan) -> str:
    m = plan.micro_batch
    return f"out of memory at on.micro_batch={m}; write a smaller one, such as on.micro_batch={max(1, m // 2)}"


def _say_goodbye(plan: Plan, run: Run, step: int, done: bool, console: Console) -> None:
    """What came out, where it is, and what to try next."""
    if not done:
        console.print(
            f"Interrupted after step {step} of {plan.steps}; saved. Go on with: paceline resume {run.folder}",
            soft_wrap=True,
        )
        return
    rows = run.rows()
    judged, reports = latest(rows, "validation"), latest(rows, "report")
    last: Row = judged[-1]
    console.print(
        f"\n[bold green]top-1 {last['top1']:.2%}[/bold green], top-5 {last['top5']:.2%} of {last['images']:,} "
        f"validation images after {plan.epoch(step):.3g} epochs, {reports[-1]['total_seconds']:.1f} s of training.",
        highlight=False,
        soft_wrap=True,
    )
    for row in [row for row in latest(rows, "average")[-1:] if plan.averaged_steps]:
        console.print(
            f"[bold green]top-1 {row['top1']:.2%}[/bold green] of the mean of the last {len(row['steps'])} "
            f"checkpoints: {run.folder / 'averaged'}",
            highlight=False,
            soft_wrap=True,
        )
    bad = listed(run.folder)
    if bad:
        console.print(
            f"[yellow]{len(bad)} images cannot be decoded and were replaced by their neighbours:[/yellow] "
            f"{escape(str(run.folder / QUARANTINE))}",
            soft_wrap=True,
        )
    if reports[-1]["bad_steps"]:
        console.print(
            f"[red]{reports[-1]['bad_steps']} steps were skipped: their gradients were not finite[/red]", soft_wrap=True
        )
    console.print(
        f"Run folder: {run.folder}\n\nNext: paceline validate {run.folder}\n      paceline verify shapes/resnet8\n"
        f"      paceline train cifar10/resnet20 --data FOLDER\n      paceline recipes",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
