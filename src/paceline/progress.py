"""Tells people at the terminal how far a long task is, and what they should know."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.visible import one_line, visible_output

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is in all."""


def silent(*_: object) -> None:
    """The progress of what nobody watches."""


def notify(line: str) -> None:
    """Print a remark to stderr, where it is in no script's way."""
    print(one_line(line), file=sys.stderr)


@contextmanager
def progress_bar(watched: bool = True) -> Iterator[Progress]:
    """Show a progress bar on the terminal for as long as the block runs; nothing where nobody watches."""
    if not (watched and sys.stderr.isatty()):
        yield silent
        return
    from rich import progress  # noqa: PLC0415 - most commands show none
    from rich.markup import escape  # noqa: PLC0415

    from paceline.terminal import Terminal  # noqa: PLC0415

    # Lines that are printed meanwhile pass through the bar's terminal, unless they go to a file.
    bar = progress.Progress(
        progress.TextColumn("[bold]{task.description}"), progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(), progress.TextColumn("in"), progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(), progress.TextColumn("left"),
        console=Terminal(stderr=True, works_on=True), transient=True, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    tasks: dict[str, progress.TaskID] = {}

    def show(task: str, done: int, total: int) -> None:
        if task not in tasks:
            tasks[task] = bar.add_task(escape(task), total=total)
        if done < bar.tasks[tasks[task]].completed:  # the same once more, such as the validation of the next checkpoint
            bar.reset(tasks[task])
        bar.update(tasks[task], completed=done, total=total)

    with bar, visible_output():
        yield show
