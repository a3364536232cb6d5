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
    programs: int = 4
    """How many programs a multiprocessor is given, where each has several tiles, one after another."""

    @property
    def bytes(self) -> int:
        """Shared memory for the 16-bit operands that are under way."""
        return 2 * self.stages * self.inner * (self.rows + self.columns)

    @property
    def streaming_bytes(self) -> int:
        """Shared memory for weights that stay there, rows that are under way, and results."""
        return 2 * (self.inner * (self.columns + self.stages * self.rows) + self.columns * self.rows)

    @property
    def registers(self) -> int | None:
        """The most that a thread may have, so that two programs of eight warps fit a multiprocessor."""
        return 128 if self.warps == 8 else None

    def within(self, memory: int) -> Tile:
        """This tile, or the next smaller one whose operands fit so many bytes of shared memory."""
        small = self
        while small.bytes > memory and small.stages > 2:
            small = small._replace(stages=small.stages - 1)
        while small.bytes > memory and small.columns > 64:
            small = small._replace(columns=small.columns // 2)
        return small


@cache
def measured() -> dict[str, Tile]:
    """The measured tiles, by kernel, columns and inner columns, such as product_norm 256 64."""
    text = files("paceline.model.kernels").joinpath("tiles.json").read_text()
    return {name: Tile(*numbers) for name, numbers in json.loads(text).items()}


def tile(kernel: str, columns: int, inner: int, memory: int) -> Tile:
    """The tile for a shape: the measured one, or one that does well for most, that fits so much shared memory."""
    widest = 128 if columns % 128 == 0 else 64
    default = Tile(64 if widest == 128 else 128, widest, 64, 4, 3)
    found = measured().get(f"{kernel} {columns} {inner}", default)
    if found.inner == inner and found.streaming_bytes <= memory:
        return found
    return (default if found.inner == inner else found).within(memory)
