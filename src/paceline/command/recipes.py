"""paceline recipes: what can be trained by name, or one page of it to copy and edit."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import yaml
from rich.table import Table

from paceline.command.tables import show_line
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.recipe import Recipe
from paceline.sink.console import console

# The C parser reads all pages in the time in which the other one reads a few.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_LEAST = ("source", "model", "data", "global_batch", "published", "epochs")
"""The columns that a narrow terminal does without, the first of them first; a name says most of it."""


def run(name: str | None, everything: bool, as_json: bool) -> None:
    """List Paceline's own recipes, all, or those of one system; or print one."""
    names = shipped.names("recipes")
    listed = names if everything else [each for each in names if each.startswith(f"{name}/")]
    if name is None or listed:
        listed = listed or shipped.own_names("recipes")
        rows = [row(each) for each in sorted(listed, key=_by_numbers)]
        if as_json:
            print(json.dumps(rows, indent=1))
            return
        _show(rows)
        if name is None and not everything:
            published = sorted(set(names) - set(listed))
            systems = ", ".join(sorted({each.partition("/")[0] for each in published}))
            show_line(f"\n{len(published)} more were published by others ({systems}).")
            show_line("List them with: paceline recipes --all, or: paceline recipes nvidia")
    elif as_json:
        settings = build(Recipe, shipped.tree("recipes", name))
        print(json.dumps({"name": name, **json.loads(settings.model_dump_json())}, indent=1))
    else:
        print(shipped.page("recipes", name)[0], end="")


def row(name: str) -> dict[str, Any]:
    """One line about a recipe, as its page has it; tests check the pages."""
    written = yaml.load(shipped.page("recipes", name)[0], Loader=_LOADER)
    return {
        "name": name,
        "model": _kind(written["model"]),
        "data": _kind(written.get("data", "any")),
        "global_batch": written["global_batch"],
        "epochs": written["epochs"],
        "published": written.get("published", ""),
        "source": written.get("source", ""),
    }


def _kind(written: str | dict[str, Any]) -> str:
    """A bare name is short for a kind with its defaults."""
    return written if isinstance(written, str) else written["name"]


def _show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table of the columns that fit the terminal, and say which do not."""
    texts = [{column: _shown(value) for column, value in each.items()} for each in rows]
    widths = {
        column: max(len(column), *(len(each[column]) for each in texts))
        for column in rows[0]
        if any(each[column] for each in rows)
    }
    missing: list[str] = []
    for column in _LEAST:
        if column in widths and sum(widths.values()) + 2 * (len(widths) - 1) > console().width:
            del widths[column]
            missing = [*missing, column.replace("_", " ")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in widths:
        side: Literal["left", "right"] = "right" if column in ("global_batch", "epochs") else "left"
        table.add_column(column.replace("_", " "), justify=side, no_wrap=column == "name", overflow="fold")
    for each in texts:
        table.add_row(*(each[column] for column in widths))
    console().print(table)
    if missing:
        show_line(f"\nA wider terminal also shows: {', '.join(missing)}.")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts a batch of 1,920 before one of 10,240."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
