"""Prints tables for people, and the same rows as JSON for scripts."""

from __future__ import annotations

import re
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.record import json_text
from paceline.sink.console import console
from paceline.visible import one_line

_HEADINGS = {"top1": "top-1", "top5": "top-5", "f1": "F1", "images_per_second": "images/s"}
"""Headings of keys that do not read as words."""


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table whose columns are their keys, or as a JSON list."""
    if as_json:
        print(json_text(rows, indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = list(rows[0]) if rows else []
    for column in columns:
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(_heading(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(format_value(column, row[column]))) for column in columns))
    console().print(table)


def show_listing(rows: list[dict[str, Any]], least: tuple[str, ...]) -> None:
    """Print rows as a table of the columns that fit the terminal, and say which do not.

    `least` are the columns that a narrow one does without, the first of them first.
    """
    texts = [{column: _listed(value) for column, value in each.items()} for each in rows]
    widths = {
        column: max(len(column), *(len(line) for each in texts for line in each[column].split("\n")))
        for column in rows[0]
        if any(each[column] for each in rows)
    }
    missing: list[str] = []
    for column in least:
        if column in widths and sum(widths.values()) + 2 * (len(widths) - 1) > console().width:
            del widths[column]
            missing = [*missing, _heading(column)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in widths:
        numeric = all(isinstance(each[column], int | float) or not each[column] for each in rows)
        whole = column == "name"
        table.add_column(_heading(column), justify="right" if numeric else "left", no_wrap=whole, overflow="fold")
    for each in texts:
        table.add_row(*(each[column] for column in widths))
    console().print(table)
    if missing:
        show_line(f"\nA wider terminal also shows: {', '.join(missing)}.")


def _listed(value: Any) -> str:
    """A value in a listing; a list has a line for each of its items."""
    if isinstance(value, list):
        return "\n".join(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def by_numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts a batch of 1,920 before one of 10,240."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def show_facts(facts: dict[str, Any], as_json: bool, title: str | None = None) -> None:
    """Print names and values one below the other, or as a JSON object."""
    if as_json:
        print(json_text({name.replace(" ", "_").replace("-", "_"): value for name, value in facts.items()}, indent=1))
        return
    if title is not None:  # above the table: inside it, a narrow table would fold it
        console().print(one_line(title), style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(
            Text(one_line(_heading(name))), Text("-" if value is None else one_line(format_value(name, value)))
        )
    console().print(table)


def show_line(text: str) -> None:
    """Print a line, which a terminal gets wrapped between words and a pipe gets whole."""
    terminal = console()
    terminal.print(text, markup=False, highlight=False, soft_wrap=not terminal.is_terminal)


def format_value(name: str, value: Any) -> str:
    """Format a value for people: accuracies in percent, rates and counts with thousands separators."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    match name:
        case "top1" | "top5" | "precision" | "recall":
            return f"{value:.2%}"
        case "loss" | "f1":
            return f"{value:.4f}"
        case "epoch" | "seconds":
            return f"{value:,.2f}"
        case "images_per_second":
            return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        case _:
            return f"{value:.6g}"


def _heading(name: str) -> str:
    return _HEADINGS.get(name, name.replace("_", " "))
