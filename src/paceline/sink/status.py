"""Where a run stands, by the rows of its record: what the live display and `paceline watch` show."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.record import Row, is_whole
from paceline.visible import one_line, plural

MOST_EVENTS = 100
"""Events that are kept: many more than anybody is shown."""
SILENT, REPORTS, STARTING = 60.0, 5, 600.0
"""A run counts as silent after so many seconds, and so many times the usual pause between two reports; after so many
seconds if there is no report since it started, which takes longer."""


class Point(NamedTuple):
    """What curves need of a report."""

    step: int
    seconds: float
    loss: float | None
    top1: float
    lr: float | None


class Event(NamedTuple):
    """Something that people should know of a run."""

    at: float
    text: str
    bad: bool


class Status:
    """Takes the rows of a run one by one, in the order of the record; damaged ones are passed over."""

    def __init__(self) -> None:
        self.phase = "no record yet"
        """What the run is doing, in a word: starting, training, validating, finishing, ended, interrupted or failed."""
        self.step = 0
        """The newest step; who knows of a later one before there is a row of it may set it."""
        self.steps = 0
        """Steps of the whole run; 0 where the record does not say."""
        self.epochs = 0.0
        self.metric = "top1"
        self.report: Row = {}
        """The newest report."""
        self.points: list[Point] = []
        self.speed: float | None = None
        """Images a second on average; the first report of each start, which warms up, counts only if it is alone."""
        self.validations: list[tuple[int, float]] = []
        """Step and top-1 of each validation, in the order of steps."""
        self.last: Row | None = None
        self.best: Row | None = None
        self.events: list[Event] = []
        self.bad_steps = 0
        self.at = 0.0
        """When the newest row was written."""
        self._seconds = self._known_at = 0.0
        self._begin = self._first = Point(0, 0.0, None, 0.0, None)
        self._reports = 0
        self._images = self._image_seconds = 0.0

    def take(self, row: Row, at: float) -> None:
        """Take a row that was written at a time, in seconds of whatever clock `elapsed` is asked by."""
        if not is_whole(row) or not all(map(_is_sane, row.values())):
            return
        self.at = at
        step = int(row.get("step", self.step))
        match row["kind"]:
            case "start":
                self._start(row, step)
            case "report":
                self._report(row, step)
            case "validation-start":
                self.phase = "validating"
            case "validation":
                self._validation(row, step)
            case _:
                self._event(row, step)
        if row["kind"] in ("start", "report"):
            self._known_at = at

    def _start(self, row: Row, step: int) -> None:
        if self.phase != "no record yet":
            killed = self.phase not in ("interrupted", "failed")
            before = f"killed after step {self.step:,}, " if killed else ""
            self._tell(f"{before}resumed at step {step:,}", bad=killed)
        changed = row.get("arithmetic_changed")
        for key, pair in changed.items() if isinstance(changed, dict) else ():
            if isinstance(pair, list) and len(pair) == 2:
                self._tell(f"on.{key} was {pair[0]} and is {pair[1]}: rounding changes from here on", bad=True)
        self.phase, self.step = "starting", step
        self.steps, self.epochs = int(_number(row.get("steps"))), _number(row.get("epochs"))
        self.metric = "loss" if row.get("metric") == "loss" else "top1"
        while self.points and self.points[-1].step > step:  # those steps are trained again
            self.points.pop()
        self._begin = self.points[-1] if self.points else Point(0, 0.0, None, 0.0, None)
        self._begin = self._first = self._begin._replace(step=step)
        self._seconds, self._reports = self._begin.seconds, 0

    def _report(self, row: Row, step: int) -> None:
        point = Point(step, float(row["total_seconds"]), row["loss"], float(row["top1"]), row["lr"])
        self.phase = "finishing" if self.steps and step >= self.steps else "training"
        self.report, self.step, self._seconds = row, step, point.seconds
        self.points.append(point)
        self._reports += 1
        images, speed = _number(row.get("images")), float(row["images_per_second"])
        if self._reports == 1:
            self._first = point
        elif speed > 0:
            self._images += images
            self._image_seconds += images / speed
        self.speed = self._images / self._image_seconds if self._image_seconds else speed
        if row["bad_steps"] > self.bad_steps:
            self._tell(f"{plural(row['bad_steps'], 'bad step')} by step {step:,}", bad=True)
        self.bad_steps = row["bad_steps"]

    def _validation(self, row: Row, step: int) -> None:
        if not self.is_over:  # `paceline validate` writes to the record as well
            self.phase = "finishing" if self.steps and step >= self.steps else "training"
        place = bisect_left(self.validations, (step, -math.inf))
        again = place < len(self.validations) and self.validations[place][0] == step
        self.validations[place : place + again] = [(step, float(row["top1"]))]
        self.last = row
        if self._is_better(row):
            self.best = row

    def _is_better(self, row: Row) -> bool:
        """Whether a validation is the best so far; one of a part of the images only where no other was made."""
        value = row[self.metric]
        if value is None or self.best is None:
            return value is not None
        if bool(row.get("partial")) != bool(self.best.get("partial")):
            return not row.get("partial")
        best = self.best[self.metric]
        return bool(value < best if self.metric == "loss" else value > best)

    def _event(self, row: Row, step: int) -> None:
        match row["kind"]:
            case "note" if row.get("warning"):
                self._tell(str(row.get("text")), bad=True)
            case "stop":
                self.phase = "finishing"
                self._tell(f"ended by {row.get('reason')} after step {step:,}")
            case "average":
                self._tell(f"top-1 {row['top1']:.2%} of the mean of {plural(len(row['steps']), 'checkpoint')}")
            case "end" | "interrupted" as kind:
                self.phase, self.step = "ended" if kind == "end" else kind, step
                if kind == "interrupted":
                    self._tell(f"interrupted by a {row.get('why', 'signal')} after step {step:,}, saved", bad=True)
            case "failed":
                self.phase = "failed"
                self._tell(f"failed: {row.get('why')}", bad=True)
            case _:
                pass

    def _tell(self, text: str, *, bad: bool = False) -> None:
        self.events = [*self.events[-MOST_EVENTS:], Event(self.at, one_line(text), bad)]

    @property
    def is_over(self) -> bool:
        """Whether the newest start has written its last row."""
        return self.phase in ("ended", "interrupted", "failed")

    def elapsed(self, now: float) -> float:
        """Seconds of running, over all starts; a run that is over stands still."""
        return self._seconds + max(0.0, (self.at if self.is_over else now) - self._known_at)

    @property
    def step_seconds(self) -> float | None:
        """Seconds that a step of this start takes, with its share of validating and saving; None before a report."""
        if not self._reports:
            return None
        begin = self._first if self._reports > 1 else self._begin  # the first report warms up
        steps = self.points[-1].step - begin.step
        return (self.points[-1].seconds - begin.seconds) / steps if steps > 0 else None

    def left(self) -> float | None:
        """Seconds to the last step; None where nobody knows."""
        seconds = self.step_seconds
        return None if seconds is None or not self.steps else max(0, self.steps - self.step) * seconds

    @property
    def epoch(self) -> float:
        """How many epochs were seen."""
        return self.step * self.epochs / self.steps if self.steps else _number(self.report.get("epoch"))

    def epoch_steps(self) -> tuple[int, float, float]:
        """The number of the epoch that is trained, from 1, and where it begins and ends, in steps."""
        whole = self.steps / self.epochs
        number = max(1, min(math.ceil(self.epochs), math.floor(self.step / whole) + 1))
        return number, (number - 1) * whole, min(number * whole, float(self.steps))

    def seconds_at(self, step: float) -> float:
        """Seconds of running after a step, as far as reports tell."""
        place = bisect_left(self.points, (step,))
        before = self.points[place - 1] if place else Point(0, 0.0, None, 0.0, None)
        if place == len(self.points):
            return before.seconds + (step - before.step) * (self.step_seconds or 0.0)
        after = self.points[place]
        share = (step - before.step) / max(1, after.step - before.step)
        return before.seconds + share * (after.seconds - before.seconds)

    def silence(self, now: float) -> float | None:
        """Seconds since the last row, if that is longer than this run's rows lead one to expect."""
        gaps = [after.seconds - before.seconds for before, after in pairwise(self.points[-4:])]
        silent = now - self.at
        validating = _number(self.last.get("seconds")) if self.last and self.phase == "validating" else 0.0
        longest = max(SILENT, REPORTS * max([*gaps, validating])) if self._reports else STARTING
        over = self.is_over or self.phase == "no record yet"
        return None if over or silent < longest else silent


def _is_sane(value: object) -> bool:
    """Whether a value is not a number that nothing can be computed with."""
    return not isinstance(value, int | float) or abs(value) < 1e18  # false for one that is no number


def _number(value: Any) -> float:
    """A number of a row that may lack it or hold something else; 0 then."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if right else 0.0
