"""What trackers are told: what a row says under the same keys everywhere, and the settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.histogram import HISTOGRAMS, Histogram, read_histograms
from paceline.planning import Plan
from paceline.record import SAMPLES, Row
from paceline.settings.read import flow, values_by_address

SECTIONS = {"report": "training", "validation": "validation", "average": "average"}
"""The kinds of rows whose numbers trackers show, and what the keys of these begin with."""
PICTURE = f"{SAMPLES}/images"
TRACKED = (*SECTIONS, HISTOGRAMS, SAMPLES)
"""All kinds of rows that trackers show."""


class Picture(NamedTuple):
    """A picture in a file."""

    path: Path
    caption: str


@dataclass(frozen=True)
class TrackedRow:
    """What one row tells of a step, by key; each key begins with the section."""

    section: str
    step: int
    numbers: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)


class Tracker(Protocol):
    """A program that shows the curves of runs. One thread calls it, and may wait for it."""

    def last_steps(self) -> dict[str, int]:
        """The last step of each section that it has from earlier starts."""

    def send(self, row: TrackedRow) -> None:
        """Store what a row tells, such that a kill does not lose it afterwards."""

    def close(self, kind: str) -> None:
        """Finish; `kind` is that of the last row of this start: end, interrupted or failed."""


def tracked(row: Row, folder: Path) -> list[TrackedRow]:
    """What trackers show of a row of the run in a folder: each finite number as SECTION/FIELD, and what is in the file
    that it names, if that is there."""
    step = row["step"]
    if row["kind"] == HISTOGRAMS:
        return [TrackedRow(group, step, histograms=each) for group, each in _histograms(folder / row["file"]).items()]
    if row["kind"] == SAMPLES:
        picture = Picture(folder / row["file"], ", ".join(map(str, row["classes"])))
        return [TrackedRow(SAMPLES, step, pictures={PICTURE: picture})] if picture.path.is_file() else []
    section = SECTIONS[row["kind"]]
    numbers = {
        f"{section}/{field}": float(value)
        for field, value in row.items()
        if field != "step" and type(value) in (int, float) and math.isfinite(value)
    }
    return [TrackedRow(section, step, numbers)]


def _histograms(path: Path) -> dict[str, dict[str, Histogram]]:
    """By group the histograms that have something to show, by key; none where somebody has removed or changed them."""
    try:
        groups = read_histograms(path)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {
        group: {f"{group}/{name}": one for name, one in each.items() if one.edges} for group, each in groups.items()
    }


def tracked_settings(plan: Plan) -> dict[str, str]:
    """Every setting by the address that a command would give it, such as optimizer.lr and on.micro_batch."""
    values = values_by_address(plan.recipe) | values_by_address(plan.placement, "on.")
    return {address: flow(value) for address, value in values.items()}
