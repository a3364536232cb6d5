"""What a person sees while a run trains: a live display at a terminal, plain lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time

from rich.console import Console
from rich.markup import escape

from paceline import checkpoint
from paceline.data.load.quarantine import QUARANTINE, quarantined
from paceline.planning import Plan
from paceline.record import NOT_FINITE, REPORT, Row, Run, Sink, best_step, json_text, latest
from paceline.settings.data import Shapes
from paceline.sink.live import LiveDisplay
from paceline.terminal import Terminal
from paceline.visible import long_time, plural


def console(works_on: bool = False) -> Terminal:
    """The terminal; a pipe gets long lines whole. See `Terminal` for a command that works on without readers."""
    return Terminal(width=None if sys.stdout.isatty() else 200, works_on=works_on)


def show_evaluated(as_json: bool, row: Row) -> None:
    """Print a row of an evaluation as soon as it is there."""
    top1 = f"top-1 {row['top1']:.2%}  loss {row['loss']:.4f}  in {row['seconds']:.1f} s"
    line = json_text(row) if as_json else f"step {row['step']}  epoch {row['epoch']:.2f}  {top1}"
    console().print(line, markup=False, highlight=False, soft_wrap=True)


class ConsoleSink(Sink):
    """Bars and the newest numbers; each validation stays as a line above them."""

    def __init__(self, plan: Plan, run: Run, console: Console) -> None:
        self._plan, self._run, self._console = plan, run, console
        self._live = LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else None
        self._updated_at = time.monotonic()
        self._step = 0
        self._validates = False

    def row(self, row: Row) -> None:
        if self._live:
            self._live.row(row)
        match row["kind"]:
            case "start":
                self._start(row)
            case "report":
                self._report(row)
            case "validation-start":
                self._validates = True
            case "validation":
                self._validates = False
                self._validation(row)
            case "stop":
                self._stop(row)
            case "note":
                style = "yellow" if row["warning"] else None
                self._console.print(escape(row["text"]), style=style, highlight=False, soft_wrap=True)
            case "end":
                self._end(row)
            case "interrupted":
                folder = shlex.quote(str(self._run.folder))
                why = f"The time limit of {self._plan.placement.time_limit} is reached"
                self._print(
                    f"{why if row.get('why') == 'time limit' else 'Interrupted'} after step {row['step']} of "
                    f"{self._plan.steps}; saved. Continue with:"
                )
                self._print_whole(f"paceline resume {folder}")
            case _:
                pass

    def progress(self, what: str, done: int, total: int) -> None:
        if what == "stopping":
            self._answer_signal()
            return
        if what == "training":
            self._step = done
        if self._live:
            self._live.progress(what, done, total)
            return
        now = time.monotonic()
        # In a file only a long validation says how far it is.
        if what == "validation" and now - self._updated_at >= 10:
            self._updated_at = now
            self._console.print(f"{what}: {done:,} of {total:,} images")

    def _answer_signal(self) -> None:
        """Say at once that a signal was heard: a step may take long, and who presses again loses it."""
        what = f"step {self._step + 1}" if self._plan.replicas == 1 else "a few steps"
        doing = "leaving the validation" if self._validates else f"finishing {what}"
        self._console.print(f"{doing}, then saving; press again to stop without", soft_wrap=True)

    def _start(self, row: Row) -> None:
        self._step = row["step"]
        plan, facts, placement = self._plan, self._plan.facts, self._plan.placement
        name = getattr(plan.recipe.model, "network", plan.recipe.model.name)
        where = f"{plan.replicas} x {placement.device}" if plan.replicas > 1 else placement.device
        begin = f"from step {row['step']:,} of" if row["step"] else "for"
        self._print(
            f"{name} ({row['parameters']:,} parameters) on {plan.data.name}: {facts.images:,} images of "
            f"{facts.classes:,} classes, {begin} {plural(plan.steps, 'step')} of {plan.global_batch:,}, "
            f"{placement.precision} on {where}, into {self._run.folder}"
        )
        for key, (old, new) in row["arithmetic_changed"].items():
            self._print(f"on.{key} was {old} and is {new}: rounding changes from here on")
        if self._live:
            self._live.start(self._run.rows() or [row])  # above it stands what this run is

    def _report(self, row: Row) -> None:
        numbers = f"loss {row['loss']:.4f}  top-1 {row['top1']:.2%}  {_speed(row['images_per_second'])} images/s"
        if row["bad_steps"]:
            numbers += f"  [red]{plural(row['bad_steps'], 'bad step')}[/red]"
        if not self._live:
            steps = self._plan.steps - row["step"]
            left = f"  {long_time(steps * row['step_seconds'])} left" if steps else ""
            begin = f"step {row['step']}/{self._plan.steps}  epoch {row['epoch']:.2f}  lr {row['lr']:.3g}"
            self._console.print(f"{begin}  {numbers}{left}", soft_wrap=True)

    def _validation(self, row: Row) -> None:
        what = f"{'partial ' if row.get('partial') else ''}{'EMA' if row.get('averaged') else 'validation'}"
        top5 = f"  top-5 {row['top5']:.2%}" if self._plan.facts.classes > 5 else ""
        self._console.print(
            f"epoch {row['epoch']:.2f}  {what} top-1 [bold]{row['top1']:.2%}[/bold]{top5}  "
            f"loss {row['loss']:.4f}  in {row['seconds']:.1f} s",
            soft_wrap=True,
            highlight=False,
        )
        if "majority" in row:
            self._console.print(
                f"  unequal classes: balanced accuracy {row['balanced_accuracy']:.2%}; the largest is "
                f"{row['majority']:.2%} of the images",
                soft_wrap=True,
                highlight=False,
            )

    def _stop(self, row: Row) -> None:
        """Why a validation has ended the run."""
        name, form = ("top-1", ".2%") if row["metric"] == "top1" else ("loss", ".4f")
        if row["reason"] == "target":
            text = f"the target of {row['target']:{form}} {name} is reached"
        else:
            better = f"no finite {name}"
            if row["best"] is not None:
                better = f"no better {name} than {row['best']:{form}} after step {row['best_step']}"
            text = f"{plural(row['no_better'], 'validation')} in a row had {better}"
        self._console.print(f"Ended after step {row['step']} of {self._plan.steps}: {text}", soft_wrap=True)

    def _end(self, row: Row) -> None:
        """What came out, where it is, and what to try next."""
        folder, rows = shlex.quote(str(self._run.folder)), self._run.rows()
        if latest(rows, "report"):  # of which a damaged record may have lost all
            self._result(row, rows)
        images = self._plan.facts.validation_images
        verbs = [f"validate {folder} --details"] if images else []
        verbs += [f"predict {folder} IMAGES"] if self._plan.facts.channels == 3 else []
        if isinstance(self._plan.data, Shapes):
            verbs = [*verbs[:1], "verify shapes/resnet8", "train cifar10/resnet20 --data FOLDER", "recipes"]
        lines = "\n      ".join(f"paceline {verb}" for verb in verbs)
        report = f"\nReport: {self._run.folder / REPORT}" if "report" in self._plan.placement.sinks else ""
        self._print_whole(f"Run folder: {self._run.folder}{report}\n\nNext: {lines}")

    def _result(self, row: Row, rows: list[Row]) -> None:
        """How good the network is that came out, and what was wrong."""
        validations, reports = latest(rows, "validation"), latest(rows, "report")
        count = f"{self._plan.epoch(row['step']):.3g}"
        epochs = f"{count} epoch" if count == "1" else f"{count} epochs"
        length = f"{epochs} in {long_time(reports[-1]['total_seconds'])}."
        if validations:
            self._accuracy(validations[-1], length)
        else:
            self._print(f"\nTrained {length}")
        if "images_per_second" in row:
            quartiles = [row["images_per_second_spread"][f"{end}_quartile"] for end in ("lower", "upper")]
            low, high = map(_speed, quartiles)
            half = f" (half of the reports between {low} and {high})" if low != high else ""
            self._print(f"{_speed(row['images_per_second'])} images/s{half}.")
        stop, folder = self._plan.recipe.stop, shlex.quote(str(self._run.folder))
        saved = best_step(rows, checkpoint.saved_steps(self._run.checkpoints), stop)
        best = next((row for row in validations if row["step"] == saved), None)
        last = validations[-1] if validations else None
        if best and last and (last[stop.metric] is None or stop.is_better(best[stop.metric], last[stop.metric])):
            value = f"{best['top1']:.2%}" if stop.metric == "top1" else f"loss {best['loss']:.4f}"
            self._print_whole(
                f"The best checkpoint: {value} after step {saved}: paceline validate {folder} --checkpoint best"
            )
        for average in latest(rows, "average")[-1:] if self._plan.averaged_steps else []:
            self._print_bold(
                f"[bold green]top-1 {average['top1']:.2%}[/bold green] of the mean of the last "
                f"{plural(len(average['steps']), 'checkpoint')}: {escape(str(self._run.folder / 'averaged'))}"
            )
        self._print_problems(reports[-1])

    def _accuracy(self, last: Row, length: str) -> None:
        """What the last validation gave."""
        top5 = f", top-5 {last['top5']:.2%}" if self._plan.facts.classes > 5 else ""  # five of five are always right
        part = f"{last['images']:,} of " if last.get("partial") else ""
        images = plural(last["of_images"] if part else last["images"], "validation image")
        self._print_bold(f"\n[bold green]top-1 {last['top1']:.2%}[/bold green]{top5} of {part}{images} after {length}")

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
        """Print a text, on a terminal broken between words."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _print_whole(self, text: str) -> None:
        """Print commands and paths, which are copied from a terminal as they are."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_bold(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)


def _speed(images: float) -> str:
    """Images per second; slow ones are not rounded to nothing."""
    return f"{images:,.0f}" if images >= 10 else f"{images:.2g}"
