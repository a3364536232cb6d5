"""paceline watch: shows runs while they train, from another shell, by what is new in their records."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from paceline.errors import RunError
from paceline.files import Tail
from paceline.machine import AcceleratorLoad, accelerator_loads
from paceline.record import RECORD
from paceline.sink.console import console
from paceline.sink.drawing import fitted
from paceline.sink.panel import GAP, Scale, bars, has_times, numbers, pictures, problems, scale_of
from paceline.sink.status import Status
from paceline.visible import long_time, one_line, plural

PAUSE = 1.0
"""Seconds between two looks at the records."""
LOOKS = 5.0
"""Seconds between two looks at the accelerators."""
NARROWEST = 18
"""Columns that a run needs beside others."""
CURVES = 5
"""Lines of a curve where the terminal sets no bound."""
LEAST = 4
"""Lines that a run needs."""
EVENTS = 3
"""Events that are shown: the newest of a run, or the newest one of each of several."""


def run(folders: list[Path], once: bool) -> int:
    """Show runs until all have ended, or until Ctrl-C; once where nobody watches."""
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: there is no such folder; name a run folder, such as runs/first")
    picture = watch_all(folders)
    terminal = console()
    if once or not terminal.is_terminal or terminal.is_dumb_terminal:
        picture.look()
        picture.loads = accelerator_loads()
        _print(terminal, picture)
        return 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the terminal is given back as it was
    try:
        _follow(terminal, picture)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    _print(terminal, picture)
    return 0


def watch_all(folders: list[Path]) -> Picture:
    """What shows some runs, under names as short as tell them apart."""
    names = [folder.name for folder in folders]
    short = len(folders) > 1 and len({*names}) == len(names) and all(names)
    return Picture([Watched(folder, folder.name if short else str(folder)) for folder in folders])


def _follow(terminal: Console, picture: Picture) -> None:
    """Show what is new until all runs have ended."""
    threading.Thread(target=_look_at_accelerators, args=(picture,), daemon=True).start()
    with Live(picture, console=terminal, screen=True, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            picture.look()
            live.refresh()
            if all(watched.status.phase == "ended" for watched in picture.runs):
                return
            time.sleep(PAUSE)


def _look_at_accelerators(picture: Picture) -> None:
    """Ask the driver's tool, which may take long, now and then."""
    while True:
        picture.loads = accelerator_loads()
        if not picture.loads:
            return
        time.sleep(LOOKS)


def _print(terminal: Console, picture: Picture) -> None:
    """Leave the picture in the terminal, or in a file, where each run has lines of its own."""
    picture.bounded = False
    picture.beside = terminal.is_terminal
    terminal.print(picture, width=None if terminal.is_terminal else 80)


class Watched:
    """A run that is watched: where it stands by its record, of which only new lines are read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = one_line(name)
        self._tail = Tail(folder / RECORD)
        self.status = Status()
        self.fault = ""
        """Why the record cannot be read at the moment."""

    def look(self) -> None:
        """Take what is new."""
        try:
            rows, replaced = self._tail.read()
            self.fault = ""
        except OSError as fault:
            rows, replaced, self.fault = [], False, f"the record cannot be read: {fault.strerror}"
        if replaced:
            self.status = Status()
        for row in rows:
            self.status.take(row, self._tail.changed_at)

    def heading(self, now: float, width: int) -> Text | None:
        """Name and state on one line, if it has room for them."""
        line = Text.assemble((self.name, "bold"), GAP, self.state(now))
        return line if line.cell_len <= width else None

    def state(self, now: float) -> Text:
        """What the run is doing, in a few words."""
        status, silence = self.status, self.status.silence(now)
        if self.fault:
            return Text(self.fault, "red")
        if silence is not None:
            return Text(f"silent {long_time(silence)}", "yellow")
        styles = {"ended": "green", "failed": "red", "interrupted": "yellow"}
        return Text(status.phase, styles.get(status.phase, "cyan"))


class Picture:
    """Everything that is shown: runs side by side, what happened to them, and accelerators."""

    def __init__(self, runs: list[Watched]) -> None:
        self.runs = runs
        self.loads: list[AcceleratorLoad] = []
        self.bounded = True
        """Whether it has to fit the height of the terminal."""
        self.beside = True
        """Whether runs stand side by side."""

    def look(self) -> None:
        """Take what is new in the records."""
        for watched in self.runs:
            watched.look()

    def __rich_console__(self, terminal: Console, options: ConsoleOptions) -> RenderResult:
        now, width, ascii_only = time.time(), options.max_width, options.ascii_only
        most = min(EVENTS, terminal.height // 5) if self.bounded else EVENTS
        below = [*self._events(width, most), *self._accelerators(width)]
        room = max(1, (terminal.height - len(below)) // LEAST) if self.bounded else len(self.runs)
        across = max(1, min(len(self.runs), (width + len(GAP)) // (NARROWEST + len(GAP)))) if self.beside else 1
        rows = [self.runs[first : first + across] for first in range(0, len(self.runs), across)]
        if hidden := sum(map(len, rows[room:])):
            below.append(fitted(Text(f"A larger terminal shows {plural(hidden, 'more run')}."), width))
            rows = rows[:room]
        height = (terminal.height - len(below)) // len(rows) if self.bounded else None
        scale = scale_of([watched.status for watched in self.runs])
        column = (width - (across - 1) * len(GAP)) // across
        lines: list[Text] = []
        for row in rows:
            apart = any(watched.heading(now, column) is None for watched in row)
            columns = [_column(watched, now, column, height, scale, ascii_only, apart) for watched in row]
            tallest = max(map(len, columns))
            filled = [[*each, *[Text(" " * column)] * (tallest - len(each))] for each in columns]
            lines += [Text(GAP).join(parts) for parts in zip(*filled, strict=True)]
            lines += [] if self.bounded else [Text()]
        for line in [*lines, *below]:
            line.rstrip()
        yield Text("\n").join([*lines, *below])

    def _events(self, width: int, most: int) -> list[Text]:
        """The newest events, the oldest of them first."""
        several = len(self.runs) > 1
        told = [
            (event, f"{watched.name}: " if several else "")
            for watched in self.runs
            for event in watched.status.events[-1 if several else -most :]
        ]
        told.sort(key=lambda pair: pair[0].at)
        lines = [
            Text(f"{whose}{event.text}", "yellow" if event.bad else "")
            for event, whose in told[len(told) - min(most, len(told)) :]
        ]
        return [fitted(line, width) for line in lines]

    def _accelerators(self, width: int) -> list[Text]:
        """How busy the accelerators of this machine are, several on a line."""
        words = [
            f"GPU {load.index} {'-' if load.busy is None else load.busy}% "
            f"{load.used / 2**30:.1f} of {load.memory / 2**30:.0f} GiB"
            for load in self.loads
        ]
        across = max(1, (width + len(GAP)) // (max(map(len, words), default=0) + len(GAP)))
        lines = [GAP.join(words[first : first + across]) for first in range(0, len(words), across)]
        return [fitted(Text(line), width) for line in lines]


def _column(
    watched: Watched, now: float, width: int, height: int | None, scale: Scale, ascii_only: bool, apart: bool
) -> list[Text]:
    """A run in a column of this width, and of at most this height; name and state on lines of their own if `apart`."""
    status, heading = watched.status, watched.heading(now, width)
    if heading is None or apart:
        lines = [fitted(Text(_short(watched.name, width), "bold"), width), fitted(watched.state(now), width)]
    else:
        lines = [fitted(heading, width)]
    if status.phase == "no record yet":
        return lines[:height]
    if status.silence(now) is not None:  # nobody knows whether it still runs
        now = status.at
    drawn = bars(status, None, now, width, ascii_only)
    lines += [*drawn, *numbers(status, now, width, times=not has_times(drawn)), *problems(status, width)]
    room = CURVES * (1 if width >= 80 else 3) if height is None else height - len(lines)
    if status.points and room >= 2:
        lines += pictures(status, scale, width, room, ascii_only)
    return lines[:height]


def _short(name: str, width: int) -> str:
    """The end of a path that is too long, which tells runs apart."""
    return name if len(name) <= width else f"...{name[3 - width :]}"
