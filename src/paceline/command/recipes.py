"""paceline recipes: what can be trained by name, or one page of it to copy and edit."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import yaml
from rich.table import Table

from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.recipe import Recipe
from paceline.sink.console import console

# The C parser reads all pages in the time in which the other one reads a few.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
        console().print(_table(rows))
        if name is None and not everything:
            published = sorted(set(names) - set(listed))
            systems = ", ".join(sorted({each.partition("/")[0] for each in published}))
            print(f"\n{len(published)} more were published by others ({systems}).")
            print("List them with: paceline recipes --all, or: paceline recipes nvidia")
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


def _table(rows: list[dict[str, Any]]) -> Table:
    """Rows as a table; names stay whole in a narrow window, so that they can be copied."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = [column for column in rows[0] if any(each[column] for each in rows)]
    for column in columns:
        side: Literal["left", "right"] = "right" if column in ("global_batch", "epochs") else "left"
        table.add_column(column.replace("_", " "), justify=side, no_wrap=column == "name", overflow="fold")
    for each in rows:
        values = [each[column] for column in columns]
        table.add_row(*(f"{value:,}" if isinstance(value, int | float) else value for value in values))
    return table


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts a batch of 1,920 before one of 10,240."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
