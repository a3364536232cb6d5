"""Draws bars and curves out of characters, on lines of a known width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.text import Text

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of the dots of a braille character, by column and row."""
BRAILLE = 0x2800

Points = tuple[str, Sequence[tuple[float, float]]]
"""A style, and the points of a curve in the order of x."""


def clock(seconds: float | None) -> str:
    """A time as a clock shows it: 1:02:03; unknown ones are dashes."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def bar(width: int, share: float | None, now: float, ascii_only: bool = False) -> Text:
    """A bar that is filled to a share; of a share that nobody knows, a piece of it moves."""
    full, rest = ("=", "-") if ascii_only else ("━", "─")
    if share is None:
        piece = max(1, width // 4)
        start = int(now * 8) % max(1, width - piece + 1)
        cells = (rest * start, full * piece, rest * (width - start - piece))
    else:
        done = min(width, int(width * max(0.0, share)))
        cells = ("", full * done, rest * (width - done))
    return Text.assemble((cells[0], "dim"), (cells[1], "green" if share and share >= 1 else "cyan"), (cells[2], "dim"))


def fitted(text: Text, width: int) -> Text:
    """A line of exactly this width."""
    line = text.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def curves(
    series: Iterable[Points], width: int, height: int, most_x: float, ys: tuple[float, float], ascii_only: bool = False
) -> list[Text]:
    """Lines with curves from 0 to `most_x` and between both `ys`; what is drawn later covers what was drawn before."""
    columns, rows = (1, 1) if ascii_only else (2, 4)
    bits = [[0] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for style, points in series:
        for x, y in _dots(points, width * columns - 1, height * rows - 1, most_x, ys):
            row, column = y // rows, x // columns
            bits[row][column] |= 1 if ascii_only else DOTS[x % columns][y % rows]
            styles[row][column] = style
    lines = []
    for row_bits, row_styles in zip(bits, styles, strict=True):
        line = Text()
        for cell, style in zip(row_bits, row_styles, strict=True):
            line.append(("*" if ascii_only else chr(BRAILLE + cell)) if cell else " ", style or None)
        lines.append(line)
    return lines


def _dots(
    points: Sequence[tuple[float, float]], last_column: int, last_row: int, most_x: float, ys: tuple[float, float]
) -> Iterable[tuple[int, int]]:
    """The dots of a curve, row 0 on top: a line from each point to the next."""
    low, high = ys
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round(last_column * min(1.0, x / most_x)) if most_x > 0 else 0
        row = last_row - round(last_row * (y - low) / (high - low)) if high > low else last_row // 2
        dot = (column, max(0, min(last_row, row)))
        yield from _line(before or dot, dot)
        before = dot


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """The dots from one to another."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for part in range(length + 1):
        yield (
            start[0] + round((end[0] - start[0]) * part / length),
            start[1] + round((end[1] - start[1]) * part / length),
        )
