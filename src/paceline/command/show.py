"""Tables for people and the same rows as JSON for scripts."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from paceline.command.job import console


def show_rows(rows: list[dict[str, Any]], as_json: bool, title: str | None = None) -> None:
    """Print rows as a table whose columns are their keys, or as a JSON list."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    columns = list(rows[0]) if rows else []
    for column in columns:
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console().print(table)


def show_facts(facts: dict[str, Any], as_json: bool, title: str | None = None) -> None:
    """Print names and values one below the other, or as a JSON object."""
    if as_json:
        print(json.dumps({name.replace(" ", "_").replace("-", "_"): value for name, value in facts.items()}, indent=1))
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, "-" if value is None else _cell(value))
    console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
