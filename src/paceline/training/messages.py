"""What a run says to a person when it begins, when it ends, and when it does not fit."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.markup import escape

from paceline import checkpoint
from paceline.data.load.quarantine import QUARANTINE, quarantined
from paceline.planning import Plan
from paceline.reconcile import fits, mixes
from paceline.record import Row, Run, best_step, latest
from paceline.settings.data import Shapes
from paceline.training.save import NOT_FINITE
from paceline.training.state import State


def say_hello(plan: Plan, run: Run, state: State, console: Console) -> None:
    """What is trained on what, where, and into which folder."""
    facts, placement = plan.facts, plan.placement
    name = getattr(plan.recipe.model, "network", plan.recipe.model.name)
    where = f"{plan.replicas} x {placement.device}" if plan.replicas > 1 else f"{placement.device}"
    begin = f"from step {state.step:,} of" if state.step else "for"
    parameters = sum(parameter.numel() for parameter in state.network.module.parameters())
    console.print(
        f"{name} ({parameters:,} parameters) on {plan.data.name}: {facts.images:,} images of "
        f"{facts.classes:,} classes, {begin} {plan.steps:,} steps of {plan.global_batch:,}, {placement.precision} on "
        f"{where}, into {run.folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def say_goodbye(plan: Plan, run: Run, step: int, done: bool, console: Console) -> None:
    """What came out, where it is, and what to try next."""
    folder = shlex.quote(str(run.folder))
    if not done:
        console.print(
            f"Interrupted after step {step} of {plan.steps}; saved. Go on with: paceline resume {folder}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    rows = run.rows()
    judged, reports = latest(rows, "validation"), latest(rows, "report")
    last: Row = judged[-1]
    top5 = f", top-5 {last['top5']:.2%}" if plan.facts.classes > 5 else ""  # five of five are always right
    console.print(
        f"\n[bold green]top-1 {last['top1']:.2%}[/bold green]{top5} of {last['images']:,} "
        f"validation images after {plan.epoch(step):.3g} epochs, {reports[-1]['total_seconds']:.1f} s of training.",
        highlight=False,
        soft_wrap=True,
    )
    kept = best_step(rows, checkpoint.saved_steps(run.checkpoints))
    best = next((row for row in judged if row["step"] == kept), last)
    if best["top1"] > last["top1"]:
        console.print(
            f"The best that is kept: {best['top1']:.2%} after step {kept}: paceline validate {folder} "
            "--checkpoint best",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for row in [row for row in latest(rows, "average")[-1:] if plan.averaged_steps]:
        console.print(
            f"[bold green]top-1 {row['top1']:.2%}[/bold green] of the mean of the last {len(row['steps'])} "
            f"checkpoints: {escape(str(run.folder / 'averaged'))}",
            highlight=False,
            soft_wrap=True,
        )
    _say_what_went_wrong(run, reports[-1], console)
    more = "\n      paceline verify shapes/resnet8\n      paceline train cifar10/resnet20 --data FOLDER"
    console.print(
        f"Run folder: {run.folder}\n\nNext: paceline validate {folder}{more if isinstance(plan.data, Shapes) else ''}\n"
        "      paceline recipes",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def too_large(plan: Plan) -> str:
    """What to write where memory does not last."""
    smaller = [
        size
        for size in range(plan.micro_batch - 1, 0, -1)
        if fits(plan.global_batch, plan.norm_batch, plan.replicas, size) and mixes(plan.recipe, size)
    ]
    remedy = (
        f"write a smaller one, such as on.micro_batch={smaller[0]}"
        if smaller
        else "no smaller one fits norm_batch and on.replicas; write on.recompute=all, or more on.replicas"
    )
    return f"out of memory at on.micro_batch={plan.micro_batch}; {remedy}"


def _say_what_went_wrong(run: Run, report: Row, console: Console) -> None:
    bad = quarantined(run.folder)
    if bad:
        console.print(
            f"[yellow]{len(bad)} damaged {'image was' if len(bad) == 1 else 'images were'} replaced by a neighbor:"
            f"[/yellow] {escape(str(run.folder / QUARANTINE))}",
            soft_wrap=True,
        )
    if skipped := report["bad_steps"]:
        console.print(
            f"[red]{skipped} {'step was' if skipped == 1 else 'steps were'} skipped: {NOT_FINITE}[/red]",
            soft_wrap=True,
        )
