"""results.png: the loss, the accuracy and the learning rate of a run as one picture, where matplotlib is installed."""

from __future__ import annotations

import io
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import RunError
from paceline.files import disk_faults, write_whole
from paceline.reporting.curves import Chart, Series, charts_of
from paceline.reporting.shown_run import ShownRun, as_percent
from paceline.settings.read import cut
from paceline.visible import long_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = "results.png"
_SHOWN = ("Loss", "Accuracy", "Learning rate")
_INK, _MUTED, _GRID = "#1d2126", "#69717c", "#e3e6ea"
_COLORS = ("#3b7dd8", "#e0803a", "#35a06c")
"""The colors of a report's curves."""
_PANEL, _TALL, _DPI = 4.2, 3.7, 150


def write_results(run: ShownRun, path: Path) -> None:
    """Draw a run into a file, if matplotlib is installed and there is something to draw."""
    charts = [chart for chart in charts_of([run]) if chart.title in _SHOWN]
    if charts and find_spec("matplotlib") is not None:
        with disk_faults(RunError, path, "cannot be written"):
            write_whole(path, _drawn(run, charts))


def _drawn(run: ShownRun, charts: list[Chart]) -> bytes:
    """The picture as a PNG. Without pyplot, whose figures are for one thread."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it tells on the terminal how it finds fonts
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who has it draws

    figure = Figure((_PANEL * len(charts), _TALL), dpi=_DPI, facecolor="white")
    left = 0.09 / len(charts)
    plain: dict[str, Any] = {"parse_math": False, "ha": "left", "va": "top"}
    # Characters that the font may not have are shown by their numbers.
    name = cut(run.name.encode("ascii", "backslashreplace").decode())
    figure.text(left, 0.965, name, color=_INK, size=13, weight="bold", **plain)
    figure.text(left, 0.885, _about(run), color=_MUTED, size=9, **plain)
    figure.subplots_adjust(left, 0.135, 1 - 0.03 / len(charts), 0.67, wspace=0.22)
    for number, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(1, len(charts), number), chart)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _about(run: ShownRun) -> str:
    """What was trained, and what came out."""
    parts = [f"{run.network} on {run.data.name}"]
    if run.best is not None:
        parts.append(f"best top-1 {as_percent(run.best['top1'])} after epoch {run.best['epoch']:.3g}")
    if run.seconds is not None:
        parts.append(f"trained {long_time(run.seconds)}")
    return "  ·  ".join(parts)


def _draw(axes: Axes, chart: Chart) -> None:
    """One chart: its name above it, its curves named below that, and quiet lines for the eye."""
    axes.set_title(chart.title, loc="left", color=_INK, size=10.5, weight="bold", pad=22)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_GRID)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=_MUTED)
    axes.set_xlabel("epoch", color=_MUTED, size=8.5)
    for series in chart.series:
        _draw_series(axes, series)
    if len(chart.series) > 1:
        legend = axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=len(chart.series), frameon=False, fontsize=8.5,
            labelcolor=_MUTED, handlelength=1.4, handletextpad=0.5, columnspacing=1.4, borderaxespad=0.0,
        )  # fmt: skip
        legend.set_in_layout(False)
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.tick_params(which="minor", length=0)
    elif chart.unit != "loss":
        axes.set_ylim(bottom=0)
    if chart.unit == "percent":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _draw_series(axes: Axes, series: Series) -> None:
    """A curve: that of a validation is strong, with its points, and that of the training thin."""
    y = [float("nan") if value is None else value for value in series.y]
    judged = series.style == "validation"
    few = (judged and len(y) <= 40) or len(y) == 1
    axes.plot(
        series.x, y, color=_COLORS[series.color % len(_COLORS)], linewidth=1.9 if judged else 1.3, label=series.name,
        marker="o" if few else None, markersize=3.5, solid_capstyle="round", clip_on=False,
    )  # fmt: skip
