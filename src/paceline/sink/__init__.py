"""Where a run's rows go. A sink is a function of a row plus one of progress; `on.sinks` names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

from rich.console import Console

from paceline.errors import SpecError
from paceline.planning import Plan
from paceline.record import Run, Sink
from paceline.settings.placement import Placement, SinkName
from paceline.sink.console import ConsoleSink
from paceline.sink.csv import CsvSink
from paceline.sink.log import LogSink
from paceline.sink.mlflow import MLflow
from paceline.sink.mlperf import MLPerfSink
from paceline.sink.tensorboard import TensorBoard
from paceline.sink.tracking import OpenTracker, TrackingSink
from paceline.sink.wandb import WeightsAndBiases

TRACKERS: dict[SinkName, OpenTracker] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""Every tracker by its name in `on.sinks`, which is also the name of its package and of the extra that brings it."""


def _tracking(name: SinkName, plan: Plan, run: Run, _console: Console) -> Sink:
    return TrackingSink(name, TRACKERS[name], plan, run)


OpenSink = Callable[[Plan, Run, Console], Sink]
SINKS: dict[SinkName, OpenSink] = {
    "console": ConsoleSink,
    "csv": CsvSink,
    "log": LogSink,
    "mlperf": MLPerfSink,
    **{name: partial(_tracking, name) for name in TRACKERS},
}
"""Every sink by its name in `on.sinks`; each is made of the plan, the run and the terminal."""


def open_sinks(
    plan: Plan, run: Run, console: Console | None = None, handed: Mapping[SinkName, OpenSink] | None = None
) -> list[Sink]:
    """The sinks that the placement names, in that order; without a console for a command that prints its own tables.

    `handed` are those that stand above this package: a command that hands none in does without them.
    """
    console, kinds = console or Console(quiet=True), SINKS | dict(handed or {})
    return [kinds[name](plan, run, console) for name in plan.placement.sinks if name in kinds]


def check_sinks(placement: Placement) -> None:
    """Refuse a tracker whose package is not installed."""
    for name in placement.sinks:
        spec = find_spec(name) if name in TRACKERS else None
        # A folder of this name, as Weights & Biases leaves where it runs, is found too, but has no file.
        if name in TRACKERS and (spec is None or spec.origin is None):
            raise SpecError(
                f"on.sinks: {name} is not installed; write pip install 'paceline[{name}]', or leave {name} out"
            )
