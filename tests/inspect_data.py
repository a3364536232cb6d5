"""What the tests of data/inspect share: a small data set, a plan for it, and tables of chosen rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from conftest import make_plan
from paceline.data.index.table import ROW, Index, Strings, Table
from paceline.data.inspect import check
from paceline.planning import Plan
from paceline.settings.data import Files
from pictures_made import make_pictures

PAGE = """
model: resnet8
data: {name: images, side: 16, images: 55, validation_images: 5, classes: 4, max_bad: 1}
global_batch: 8
norm_batch: 4
epochs: 2
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
augment: {flip: true}
report: 2 steps
"""
PICTURES = make_pictures(60, 4)
DATA = Files(name="images", side=16, classes=4)
CPU = torch.device("cpu")


def plan_of(*words: str) -> Plan:
    """A plan for this data set, with overrides."""
    return make_plan(*words, text=PAGE)


def keys_of(index: Index, bad: list[check.BadImage]) -> list[str]:
    """The keys of bad images."""
    tables = {"training": index.training, "validation": index.validation}
    return [tables[image.split].keys[image.image] for image in bad]


def table_of(*rows: dict[str, Any], keys: list[str] | None = None) -> Table:
    """A table with these columns in its rows."""
    rows_array = np.zeros(len(rows), ROW)
    for index, row in enumerate(rows):
        for name, value in row.items():
            rows_array[name][index] = value
    names = keys or [f"k{index}" for index in range(len(rows))]
    return Table(rows_array, Strings.of(["shard"]), Strings.of(names), np.zeros((0, 4), np.float32))
