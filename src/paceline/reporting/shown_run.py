"""A run as its report shows it: what its folder holds, read once, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.record import Row, Stored, best_step, judged_rows, latest, rows_of, stored_plan
from paceline.settings.data import Data

NONE = "-"
"""What stands where there is no number."""


@dataclass(frozen=True)
class ShownRun:
    """A run folder, read for a report."""

    folder: Path
    name: str
    """What a person calls the run."""
    stored: Stored
    rows: list[Row]
    validations: list[Row]
    """The last one of each step, wherever it was made."""
    data_folder: Path | None
    """Where the images are, or were."""

    @property
    def data(self) -> Data:
        assert self.stored.recipe.data is not None
        return self.stored.recipe.data

    @property
    def network(self) -> str:
        model = self.stored.recipe.model
        return str(getattr(model, "network", model.name))

    @cached_property
    def reports(self) -> list[Row]:
        """The last report of each step."""
        return latest(self.rows, "report")

    @cached_property
    def starts(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "start"]

    @cached_property
    def best(self) -> Row | None:
        """The best validation, by the metric that may end the run."""
        step = best_step(self.validations, [row["step"] for row in self.validations], self.stored.recipe.stop)
        return next((row for row in self.validations if row["step"] == step), None)

    @property
    def last(self) -> Row | None:
        """The last validation."""
        return self.validations[-1] if self.validations else None

    @property
    def seconds(self) -> float | None:
        """How long the run has trained, over all starts."""
        return number(self.reports[-1]["total_seconds"]) if self.reports else None

    @cached_property
    def speed(self) -> float | None:
        """Images a second: what the end of the run says, else the middle of its reports."""
        ends = [number(row.get("images_per_second")) for row in self.rows if row["kind"] == "end"]
        if ends and ends[-1] is not None:
            return ends[-1]
        speeds = sorted(row["images_per_second"] for row in self.reports)
        return speeds[len(speeds) // 2] if speeds else None


def read_run(folder: Path, data_folder: Path | None = None, name: str | None = None) -> ShownRun:
    """Read a run folder; `data_folder` is where its images are, if that is not what plan.yaml says."""
    stored = stored_plan(folder)
    if data_folder is None and stored.data_folder is not None:
        data_folder = Path(stored.data_folder)
    name = name or folder.resolve().name
    return ShownRun(folder, name, stored, rows_of(folder), latest(judged_rows(folder), "validation"), data_folder)


def number(value: Any) -> float | None:
    """A finite number of a row, or None: somebody may have damaged the record."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def as_percent(value: Any) -> str:
    """A fraction for people."""
    return NONE if (shown := number(value)) is None else f"{shown:.2%}"


def as_decimal(value: Any, form: str = ".4f") -> str:
    """A number for people."""
    return NONE if (shown := number(value)) is None else f"{shown:{form}}"
