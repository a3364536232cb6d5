"""The tiles of matrix kernels: how many rows, columns and inner columns a program takes at a time, by kernel and shape.

tiles.json holds the fastest ones on an H200, which benchmarks/tune_kernels.py measures. There is no tuning in a run, so
that it starts at once and the same shapes give the same bits.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Tile(NamedTuple):
    """The block of a matrix that a program works on, and how the program is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


@cache
def measured() -> dict[str, Tile]:
    """The measured tiles, by kernel, columns and inner columns, such as product_norm 256 64."""
    text = files("paceline.model.kernels").joinpath("tiles.json").read_text()
    return {name: Tile(*numbers) for name, numbers in json.loads(text).items()}


def tile(kernel: str, columns: int, inner: int) -> Tile:
    """The tile for a shape: the measured one, or one that does well for most."""
    widest = 128 if columns % 128 == 0 else 64
    default = Tile(64 if widest == 128 else 128, widest, 64, 4, 3)
    return measured().get(f"{kernel} {columns} {inner}", default)
