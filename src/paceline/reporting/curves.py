"""The curves of a report: which fields of the rows are drawn, over the epochs, one color for each run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.record import Row
from paceline.reporting.shown_run import ShownRun, number

MOST_POINTS = 1500
"""Points of a curve; of more, every so many are drawn, and always the last."""
Unit = Literal["loss", "number", "percent", "count", "bytes"]
"""How values are written; the axis of all but a loss begins at zero, and bytes are counted in GiB."""
_WIDE = 20
"""A loss that falls to so small a part of what it was is drawn in powers of ten, or its end would be a flat line."""


class _Line(NamedTuple):
    """A field of one kind of rows, and what its curve is called."""

    kind: Literal["training", "validation"]
    field: str
    name: str


class _Chart(NamedTuple):
    title: str
    unit: Unit
    lines: tuple[_Line, ...]


_CHARTS = (
    _Chart("Loss", "loss", (_Line("training", "loss", "training"), _Line("validation", "loss", "validation"))),
    _Chart(
        "Accuracy",
        "percent",
        (
            _Line("training", "top1", "training"),
            _Line("validation", "top1", "validation"),
            _Line("validation", "top5", "top-5"),
        ),
    ),
    _Chart("Learning rate", "number", (_Line("training", "lr", "learning rate"),)),
    _Chart("Images a second", "count", (_Line("training", "images_per_second", "training"),)),
    _Chart("Waiting for images", "percent", (_Line("training", "waiting", "share of the time"),)),
    _Chart("Gradient norm", "number", (_Line("training", "gradient_norm", "training"),)),
    _Chart("Memory in GiB", "bytes", (_Line("training", "memory", "training"),)),
)
_TOLD = {
    "step", "epoch", "images", "of_images", "last_loss", "last_top1", "step_seconds", "total_seconds", "seconds",
    "first_bad_step", "bad_steps_in_a_row", "majority", "images_per_second",
}  # fmt: skip
"""Fields that no curve of their own is drawn of."""
_FRACTIONS = {"balanced_accuracy": "Balanced accuracy", "macro_f1": "Macro F1", "ece": "Calibration error"}


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    color: int
    style: str
    """training, validation or second, as the page's script draws them."""
    x: list[float]
    y: list[float | None]
    step: list[int]


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    title: str
    unit: Unit
    series: list[Series]

    @property
    def logarithmic(self) -> bool:
        """Whether values are drawn in powers of ten."""
        values = [value for one in self.series for value in one.y if value is not None]
        return self.unit == "loss" and 0 < _WIDE * min(values, default=0) < max(values, default=0)

    def legend(self) -> list[Series]:
        """What has to be named below the title of a chart of one run."""
        return self.series if len(self.series) > 1 else []


def charts_of(runs: list[ShownRun]) -> list[Chart]:
    """Every chart that at least one of the runs has values for."""
    several = len(runs) > 1
    charts = []
    for title, unit, lines in [*_CHARTS, *_other_charts(runs)]:
        series = [
            _series(run, line, index if several else color, several, 2**-30 if unit == "bytes" else 1.0)
            for index, run in enumerate(runs)
            for color, line in enumerate(lines)
            if _is_drawn(runs, line)
        ]
        if any(value is not None for one in series for value in one.y):
            charts.append(Chart(title, unit, [one for one in series if one.x]))
    return charts


def _is_drawn(runs: list[ShownRun], line: _Line) -> bool:
    """Of five classes or fewer, the right one is always among the five best."""
    return line.field != "top5" or any(run.data.facts.classes > 5 for run in runs)


def _other_charts(runs: list[ShownRun]) -> list[_Chart]:
    """Charts of whatever else the rows hold, such as the calibration error."""
    known = {(line.kind, line.field) for chart in _CHARTS for line in chart.lines}
    found: dict[tuple[Literal["training", "validation"], str], bool] = {}
    for run in runs:
        for kind in ("training", "validation"):
            for row in _rows(run, kind):
                for name, value in row.items():
                    if name not in _TOLD and (kind, name) not in known and number(value) is not None:
                        found[kind, name] = found.get((kind, name), False) or value != 0
    return [
        _Chart(
            _FRACTIONS.get(name, name.replace("_", " ").capitalize()),
            "percent" if name in _FRACTIONS else "number",
            (_Line(kind, name, kind),),
        )
        for (kind, name), moves in found.items()
        if moves  # a curve of zeros, such as that of bad steps, says nothing
    ]


def _rows(run: ShownRun, kind: str) -> list[Row]:
    return run.reports if kind == "training" else run.validations


def _series(run: ShownRun, line: _Line, color: int, several: bool, scale: float) -> Series:
    rows = [row for row in _rows(run, line.kind) if line.field in row]
    every = -(-len(rows) // MOST_POINTS) or 1
    rows = [row for index, row in enumerate(rows) if index % every == 0 or index == len(rows) - 1]
    style = "second" if several and line.field == "top5" else line.kind
    name = f"{run.name}, {line.name}" if several else line.name
    values = [number(row[line.field]) for row in rows]
    return Series(
        name,
        color,
        style,
        [_short(float(row["epoch"])) for row in rows],
        [None if value is None else _short(scale * value) for value in values],
        [row["step"] for row in rows],
    )


def _short(value: float) -> float:
    """Six digits, which is more than a curve shows."""
    return float(f"{value:.6g}")


def figures(charts: list[Chart]) -> list[dict[str, Any]]:
    """The charts as the page's script reads them."""
    return [
        {"unit": chart.unit, "log": chart.logarithmic, "series": [vars(one) for one in chart.series]}
        for chart in charts
    ]
