"""Histograms as a run folder keeps them: of each parameter, how many of its numbers lie in each of equal bins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline import checkpoint
from paceline.files import read_whole, write_whole

HISTOGRAMS = "histograms"
"""The folder of the files, one for each step that was asked for, and the kind of the rows that name them."""
GROUPS = ("weights", "gradients")


@dataclass(frozen=True)
class Histogram:
    """How the numbers of one tensor are distributed."""

    low: float | None
    high: float | None
    """Where the bins begin and end: the smallest and the largest finite number, or around the only one; None without
    any."""
    counts: list[int]
    """How many numbers lie in each of the bins, which have one width from `low` to `high`."""
    not_finite: int
    """How many numbers are not finite."""

    @property
    def edges(self) -> list[float]:
        """Where bins begin and end, one more than there are bins; empty without a finite number."""
        if self.low is None or self.high is None:
            return []
        width = (self.high - self.low) / len(self.counts)
        return [self.low + number * width for number in range(len(self.counts))] + [self.high]


Histograms = dict[str, dict[str, Histogram]]
"""By group and by the parameter's name."""


def write_histograms(folder: Path, step: int, histograms: Histograms) -> str:
    """Write the histograms of a step into a run folder; gives the file's path in there."""
    name = f"{HISTOGRAMS}/{checkpoint.name_of(step)}.json"
    (folder / HISTOGRAMS).mkdir(exist_ok=True)
    groups = {group: {name: asdict(one) for name, one in each.items()} for group, each in histograms.items()}
    write_whole(folder / name, json.dumps(groups, allow_nan=False))
    return name


def read_histograms(path: Path) -> Histograms:
    """The histograms of a step; an OSError, ValueError or TypeError where the file holds none."""
    groups = json.loads(read_whole(path))
    return {group: {name: Histogram(**one) for name, one in each.items()} for group, each in groups.items()}
