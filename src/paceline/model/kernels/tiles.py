"""The tiles of matrix kernels: how many rows, columns and inner columns a program takes at a time, by kernel and shape."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The block of a matrix that a program works on, and how the program is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


MEASURED: dict[tuple[str, int, int], Tile] = {}
"""The fastest tile on an H200 for a kernel, its columns and its inner columns."""


def tile(kernel: str, columns: int, inner: int) -> Tile:
    """The tile for a shape: the measured one, or one that does well for most."""
    measured = MEASURED.get((kernel, columns, inner))
    return measured or Tile(128, min(128, columns), 64, 8 if columns >= 128 else 4, 3)
