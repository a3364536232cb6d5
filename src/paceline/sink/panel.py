"""What is shown of a run that goes on: bars, numbers and curves, as lines of a given width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.text import Text

from paceline.record import Row
from paceline.sink.drawing import Points, bar, clock, curves, fitted
from paceline.sink.status import Status
from paceline.visible import plural

GAP = "   "
SHORTEST_BAR = 6


class Doing(NamedTuple):
    """Something beside the training itself that has a bar of its own."""

    what: str
    done: int
    total: int
    """0 where nobody knows."""
    began_at: float


class Bar(NamedTuple):
    """What a bar shows: how much is done, and how long that took and will take."""

    name: str
    share: float | None
    elapsed: float
    left: float | None


class Fact(NamedTuple):
    """A number with its name."""

    name: str
    value: str
    more: str = ""
    """What is left out where there is no room."""


class Curve(NamedTuple):
    """One picture: its name, and what is drawn in it of a run."""

    name: str
    series: list[Points]

    @property
    def values(self) -> list[float]:
        """Every y in it."""
        return [y for _, points in self.series for _, y in points]


@dataclass(frozen=True)
class Scale:
    """What curves of several runs share, so that they can be compared: how far x goes, and each curve's range of y."""

    most_x: float
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)


def bars(status: Status, doing: Doing | None, now: float, width: int, ascii_only: bool = False) -> list[Text]:
    """A bar of the epoch, of the steps and of what is done beside them; with elapsed and left if there is room."""
    comma = "," if width >= 70 else ""
    if status.step and not status.steps:  # a record of an earlier version
        return [fitted(Text(f"step {status.step:{comma}} epoch {status.epoch:.2f}", "bold"), width)]
    shown = [*_steps_of(status, now, comma), *([_bar_of(doing, now, comma)] if doing else [])]
    named = max((len(each.name) for each in shown), default=0)
    times = [f" {clock(each.elapsed)} elapsed {clock(each.left):>8} left" for each in shown]
    timed = max(map(len, times), default=0)
    if width < named + 1 + SHORTEST_BAR + timed:
        timed, times = 0, [""] * len(shown)
    room = width - named - 1 - timed
    lines = []
    for each, time in zip(shown, times, strict=True):
        drawn = bar(room, each.share, now, ascii_only) if room >= 3 else ""
        lines.append(fitted(Text.assemble((each.name.ljust(named), "bold"), " ", drawn, time.rjust(timed)), width))
    return lines


def _steps_of(status: Status, now: float, comma: str) -> list[Bar]:
    """The bars of the training."""
    if not status.steps:
        return []
    elapsed, seconds = status.elapsed(now), status.step_seconds
    name = f"step {status.step:{comma}} of {status.steps:{comma}}"
    steps = Bar(name, status.step / status.steps, elapsed, status.left())
    if not status.epochs:
        return [steps]
    number, begin, end = status.epoch_steps()
    share = (status.step - begin) / max(1e-9, end - begin)
    left = None if seconds is None else max(0.0, end - status.step) * seconds
    passed = max(0.0, elapsed - status.seconds_at(begin))
    return [Bar(f"epoch {number} of {math.ceil(status.epochs)}", share, passed, left), steps]


def _bar_of(doing: Doing, now: float, comma: str) -> Bar:
    """The bar of something beside the training."""
    elapsed = now - doing.began_at
    if not doing.total:
        return Bar(doing.what, None, elapsed, None)
    share = doing.done / doing.total
    name = f"{doing.what} {doing.done:{comma}} of {doing.total:{comma}}"
    return Bar(name, share, elapsed, elapsed / share - elapsed if share else None)


def has_times(lines: Sequence[Text]) -> bool:
    """Whether bars had room for elapsed and left."""
    return any(line.plain.rstrip().endswith(" left") for line in lines)


def numbers(status: Status, now: float, width: int, times: bool = False) -> list[Text]:
    """The newest numbers of a run in as many columns as there is room for; with `times`, elapsed and left too."""
    report, speed = status.report, status.speed
    loss, top1 = Fact("loss", _form(report.get("loss"), ".4f")), Fact("top-1", _form(report.get("top1"), ".2%"))
    lr = Fact("lr", _form(report.get("lr"), ".3g"))
    wide = width >= 50
    now_speed = Fact("images/s now" if wide else "images/s", _form(report.get("images_per_second"), ",.0f"))
    average = Fact("images/s average" if wide else "average", _form(speed, ",.0f"))
    waiting = Fact("waiting", _form(report.get("waiting"), ".1%"))
    memory = Fact("memory", _bytes(report.get("memory")))
    last, best = _validation("validation", status.last), _validation("best", status.best, status.metric)
    if width >= 74:
        columns = [[loss, top1, lr], [now_speed, average, waiting], [last, best, memory]]
    elif wide:
        columns = [[loss, top1, lr, memory], [now_speed, average, waiting, last, best]]
    else:
        passed = [Fact("elapsed", clock(status.elapsed(now))), Fact("left", clock(status.left()))] if times else []
        columns = [[*passed, loss, top1, lr, now_speed, average, waiting, memory, last, best]]
    return _in_columns(columns, width)


def _in_columns(columns: list[list[Fact]], width: int) -> list[Text]:
    lines = [Text() for _ in range(max(map(len, columns)))]
    for number, column in enumerate(columns):
        named = max(len(fact.name) for fact in column)
        values = max(len(fact.value) for fact in column)
        whole = named + 1 + max(len(fact.value + fact.more) for fact in column)
        more = len(columns) > 1 or whole <= width
        room = 0 if number + 1 == len(columns) else max(named + 1 + max(values, 9), whole)
        for line, fact in zip(lines, [*column, *[None] * len(lines)], strict=False):
            start = len(line.plain)
            if fact is not None:
                line.append(fact.name.ljust(named + 1), "dim").append(fact.value).append(fact.more if more else "")
            if room:
                line.append(" " * (start + room - len(line.plain) + 2))
    return [fitted(line, width) for line in lines]


def problems(status: Status, width: int) -> list[Text]:
    """A line on steps that were skipped, if there are any."""
    bad = status.bad_steps
    return [fitted(Text(plural(bad, "bad step"), "red"), width)] if bad else []


def curves_of(status: Status) -> list[Curve]:
    """The curves of a run: loss, top-1 with that of its validations, and learning rate."""
    points = status.points
    loss, lr = ([(p.step, value) for p in points if (value := getattr(p, key)) is not None] for key in ("loss", "lr"))
    top1: Points = ("cyan", [(point.step, point.top1) for point in points])
    return [
        Curve("loss", [("cyan", loss)]),
        Curve("top-1", [top1, ("green", status.validations)]),
        Curve("lr", [("yellow", lr)]),
    ]


def scale_of(statuses: Sequence[Status]) -> Scale:
    """What the curves of some runs share."""
    ranges: dict[str, tuple[float, float]] = {}
    for status in statuses:
        for curve in curves_of(status):
            if values := curve.values:
                low, high = ranges.get(curve.name, (math.inf, -math.inf))
                ranges[curve.name] = (min(low, *values), max(high, *values))
    return Scale(max((status.points[-1].step for status in statuses if status.points), default=0), ranges)


def pictures(status: Status, scale: Scale, width: int, height: int, ascii_only: bool = False) -> list[Text]:
    """The curves of a run, each below a line with its name and range: side by side, or one below the other, or only the
    first of them, by the room there is."""
    all_curves = curves_of(status)
    beside = (width - 2 * len(GAP)) // 3
    if beside >= 20:
        drawn = [_picture(curve, scale, beside, height, ascii_only) for curve in all_curves]
        return [fitted(Text(GAP).join(lines), width) for lines in zip(*drawn, strict=True)]
    count = min(len(all_curves), height // 3)
    lines: list[Text] = []
    for number, curve in enumerate(all_curves[:count]):
        lines += _picture(curve, scale, width, (height - len(lines)) // (count - number), ascii_only)
    return lines


def _picture(curve: Curve, scale: Scale, width: int, height: int, ascii_only: bool) -> list[Text]:
    name = Text(curve.name, curve.series[0][0])
    if curve.name not in scale.ranges:
        return [fitted(name, width), *[Text(" " * width) for _ in range(height - 1)]]
    low, high = scale.ranges[curve.name]
    form = ".1%" if curve.name == "top-1" else ".3g"
    name.append(f"  {low:{form}} to {high:{form}}" if width >= 22 else f" {low:{form}}-{high:{form}}", "dim")
    if len(curve.series) > 1 and curve.series[1][1] and width >= 36:
        name.append("  validation", curve.series[1][0])
    return [fitted(name, width), *curves(curve.series, width, height - 1, scale.most_x, (low, high), ascii_only)]


def _validation(name: str, row: Row | None, metric: str = "top1") -> Fact:
    if row is None:
        return Fact(name, "-")
    value = f"{row['top1']:.2%}" if metric == "top1" else f"loss {row['loss']:.4f}"
    return Fact(name, value, f" at epoch {row['epoch']:.3g}")


def _form(value: object, form: str) -> str:
    return format(value, form) if _is_finite(value) else "-"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _bytes(value: object) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int | float) and math.isfinite(value) else "-"
