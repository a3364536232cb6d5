"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.planning import Plan
from paceline.record import Row
from paceline.sink import Sink


class Terminal(Sink):
    """A progress bar with the newest numbers beside it; each validation stays as a line above."""

    def __init__(self, plan: Plan, step: int, console: Console) -> None:
        self._plan, self._console = plan, console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._shown = time.monotonic()
        self._task = self._progress.add_task("training", total=plan.steps, completed=step, numbers="")
        images = plan.facts.validation_images
        self._judging = self._progress.add_task("validation", total=images, numbers="images", visible=False)

    def __enter__(self) -> Terminal:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, step: int) -> None:
        now = time.monotonic()
        if now - self._shown > 0.1:  # a small network makes hundreds of steps a second
            self._progress.update(self._task, completed=step)
            self._shown = now

    def judged(self, images: int) -> None:
        now = time.monotonic()
        if now - self._shown < (0.1 if self._console.is_terminal else 10):
            return
        self._shown = now
        self._progress.update(self._judging, completed=images, visible=True)
        if not self._console.is_terminal:
            self._console.print(f"validation: {images:,} of {self._plan.facts.validation_images:,} images")

    def report(self, row: Row) -> None:
        numbers = f"loss {row['loss']:.4f}  top-1 {row['top1']:.2%}  {row['images_per_second']:,.0f} images/s"
        if row["bad_steps"]:
            numbers += f"  [red]{row['bad_steps']} bad {'step' if row['bad_steps'] == 1 else 'steps'}[/red]"
        self._progress.update(self._task, completed=row["step"], numbers=numbers)
        if not self._console.is_terminal:
            self._console.print(
                f"step {row['step']}/{self._plan.steps}  epoch {row['epoch']:.2f}  {numbers}", soft_wrap=True
            )

    def validation(self, row: Row) -> None:
        self._progress.reset(self._judging, visible=False)
        what = "validation of the average" if row.get("averaged") else "validation"
        top5 = f"  top-5 {row['top5']:.2%}" if self._plan.facts.classes > 5 else ""
        self._progress.console.print(
            f"epoch {row['epoch']:6.2f}  {what}: top-1 [bold]{row['top1']:.2%}[/bold]{top5}  "
            f"loss {row['loss']:.4f}  ({row['images']:,} images in {row['seconds']:.1f} s)",
            soft_wrap=True,
            highlight=False,
        )
