"""What trackers are told: the numbers of a row under the same keys everywhere, and the settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from paceline.planning import Plan
from paceline.record import Row
from paceline.settings.read import flow, values_by_address

SECTIONS = {"report": "training", "validation": "validation", "average": "average"}
"""The kinds of rows that trackers show, and what the keys of their numbers begin with."""


@dataclass(frozen=True)
class TrackedRow:
    """The numbers of one row, by key."""

    section: str
    step: int
    numbers: dict[str, float]


class Tracker(Protocol):
    """A program that shows the curves of runs. One thread calls it, and may wait for it."""

    def last_steps(self) -> dict[str, int]:
        """The last step of each section that it has from earlier starts."""

    def send(self, row: TrackedRow) -> None:
        """Store the numbers of a row, such that a kill does not lose them afterwards."""

    def close(self, kind: str) -> None:
        """Finish; `kind` is that of the last row of this start: end, interrupted or failed."""


def tracked(row: Row) -> TrackedRow | None:
    """What trackers show of a row, if anything: each finite number as SECTION/FIELD."""
    section = SECTIONS.get(row["kind"])
    if section is None:
        return None
    numbers = {
        f"{section}/{field}": float(value)
        for field, value in row.items()
        if field != "step" and type(value) in (int, float) and math.isfinite(value)
    }
    return TrackedRow(section, row["step"], numbers)


def tracked_settings(plan: Plan) -> dict[str, str]:
    """Every setting by the address that a command would give it, such as optimizer.lr and on.micro_batch."""
    values = values_by_address(plan.recipe) | values_by_address(plan.placement, "on.")
    return {address: flow(value) for address, value in values.items()}
