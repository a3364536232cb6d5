"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline import checkpoint
from paceline.data.load.quarantine import QUARANTINE, quarantined
from paceline.planning import Plan
from paceline.record import NOT_FINITE, Row, Run, Sink, best_step, latest
from paceline.settings.data import Shapes
from paceline.terminal import Terminal


def console() -> Console:
    """The terminal; a pipe gets long lines whole."""
    return Terminal(width=None if sys.stdout.isatty() else 200)


class ConsoleSink(Sink):
    """A progress bar with the newest numbers beside it; each validation stays as a line above."""

    def __init__(self, plan: Plan, run: Run, console: Console) -> None:
        self._plan, self._run, self._console = plan, run, console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._updated_at = time.monotonic()
        images = plan.facts.validation_images
        self._tasks = {
            "training": self._bar.add_task("training", total=plan.steps, numbers=""),
            "validation": self._bar.add_task("validation", total=images, numbers="images", visible=False),
        }

    def row(self, row: Row) -> None:
        match row["kind"]:
            case "start":
                self._start(row)
            case "report":
                self._report(row)
            case "validation":
                self._validation(row)
            case "note":
                style = "yellow" if row["warning"] else None
                self._bar.console.print(escape(row["text"]), style=style, highlight=False, soft_wrap=True)
            case "end":
                self._bar.stop()
                self._end(row)
            case "interrupted":
                self._bar.stop()
                folder = shlex.quote(str(self._run.folder))
                self._print(
                    f"Interrupted after step {row['step']} of {self._plan.steps}; saved. Continue with: "
                    f"paceline resume {folder}"
                )
            case "failed":
                self._bar.stop()
            case _:
                pass

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        terminal = self._console.is_terminal
        # A small network makes hundreds of steps a second; in a file only a long validation says how far it is.
        if now - self._updated_at < (0.1 if terminal else 10) or not (terminal or what == "validation"):
            return
        self._updated_at = now
        self._bar.update(self._tasks[what], completed=done, visible=True)
        if not terminal:
            self._console.print(f"{what}: {done:,} of {total:,} images")

    def _start(self, row: Row) -> None:
        plan, facts, placement = self._plan, self._plan.facts, self._plan.placement
        name = getattr(plan.recipe.model, "network", plan.recipe.model.name)
        where = f"{plan.replicas} x {placement.device}" if plan.replicas > 1 else placement.device
        begin = f"from step {row['step']:,} of" if row["step"] else "for"
        self._print(
            f"{name} ({row['parameters']:,} parameters) on {plan.data.name}: {facts.images:,} images of "
            f"{facts.classes:,} classes, {begin} {plan.steps:,} steps of {plan.global_batch:,}, {placement.precision} "
            f"on {where}, into {self._run.folder}"
        )
        for key, (old, new) in row["arithmetic_changed"].items():
            self._print(f"on.{key} was {old} and is {new}: rounding changes from here on")
        self._bar.update(self._tasks["training"], completed=row["step"])
        self._bar.start()

    def _report(self, row: Row) -> None:
        numbers = f"loss {row['loss']:.4f}  top-1 {row['top1']:.2%}  {row['images_per_second']:,.0f} images/s"
        if row["bad_steps"]:
            numbers += f"  [red]{row['bad_steps']} bad {'step' if row['bad_steps'] == 1 else 'steps'}[/red]"
        self._bar.update(self._tasks["training"], completed=row["step"], numbers=numbers)
        if not self._console.is_terminal:
            self._console.print(
                f"step {row['step']}/{self._plan.steps}  epoch {row['epoch']:.2f}  {numbers}", soft_wrap=True
            )

    def _validation(self, row: Row) -> None:
        self._bar.reset(self._tasks["validation"], visible=False)
        what = "validation of the EMA" if row.get("averaged") else "validation"
        top5 = f"  top-5 {row['top5']:.2%}" if self._plan.facts.classes > 5 else ""
        self._bar.console.print(
            f"epoch {row['epoch']:6.2f}  {what}: top-1 [bold]{row['top1']:.2%}[/bold]{top5}  "
            f"loss {row['loss']:.4f}  ({row['images']:,} images in {row['seconds']:.1f} s)",
            soft_wrap=True,
            highlight=False,
        )

    def _end(self, row: Row) -> None:
        """What came out, where it is, and what to try next."""
        folder, rows = shlex.quote(str(self._run.folder)), self._run.rows()
        if latest(rows, "validation") and latest(rows, "report"):  # of which a damaged record may have lost all
            self._result(row, rows)
        more = "\n      paceline verify shapes/resnet8\n      paceline train cifar10/resnet20 --data FOLDER"
        self._print(
            f"Run folder: {self._run.folder}\n\nNext: paceline validate {folder}"
            f"{more if isinstance(self._plan.data, Shapes) else ''}\n      paceline recipes"
        )

    def _result(self, row: Row, rows: list[Row]) -> None:
        """How good the network is that came out, and what was wrong."""
        folder = shlex.quote(str(self._run.folder))
        validations, reports = latest(rows, "validation"), latest(rows, "report")
        last = validations[-1]
        top5 = f", top-5 {last['top5']:.2%}" if self._plan.facts.classes > 5 else ""  # five of five are always right
        self._print_bold(
            f"\n[bold green]top-1 {last['top1']:.2%}[/bold green]{top5} of {last['images']:,} validation images after "
            f"{self._plan.epoch(row['step']):.3g} epochs, {reports[-1]['total_seconds']:.1f} s of training."
        )
        saved = best_step(rows, checkpoint.saved_steps(self._run.checkpoints))
        best = next((row for row in validations if row["step"] == saved), last)
        if best["top1"] > last["top1"]:
            self._print(
                f"The best checkpoint: {best['top1']:.2%} after step {saved}: paceline validate {folder} "
                "--checkpoint best"
            )
        for average in latest(rows, "average")[-1:] if self._plan.averaged_steps else []:
            self._print_bold(
                f"[bold green]top-1 {average['top1']:.2%}[/bold green] of the mean of the last "
                f"{len(average['steps'])} checkpoints: {escape(str(self._run.folder / 'averaged'))}"
            )
        self._print_problems(reports[-1])

    def _print_problems(self, report: Row) -> None:
        damaged = quarantined(self._run.folder)
        if damaged:
            self._print_bold(
                f"[yellow]{len(damaged)} damaged {'image was' if len(damaged) == 1 else 'images were'} replaced by a "
                f"neighbor:[/yellow] {escape(str(self._run.folder / QUARANTINE))}"
            )
        if skipped := report["bad_steps"]:
            self._print_bold(
                f"[red]{skipped} {'step was' if skipped == 1 else 'steps were'} skipped: {NOT_FINITE}[/red]"
            )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_bold(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
