"""Writes the tables of settings in recipes.md and placements.md from the code: `.venv/bin/python docs/keys.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from paceline.settings.placement import Placement, keys
from paceline.settings.recipe import Recipe
from paceline.settings.schema import choices, fields, kinds
from paceline.settings.types import Settings

Row = tuple[str, str, str]

_BETWEEN = re.compile(r"(<!-- keys -->\n).*?(<!-- /keys -->)", re.DOTALL)
_GROUPS = {
    "layout": "**The same run, cut differently.**",
    "arithmetic": "**The same images and schedule, rounded differently.**",
    "keeping": "**What is saved, and where rows of the record go.**",
}


def recipe_rows(model: type[Settings] = Recipe, start: str = "") -> Iterator[Row]:
    """Every setting of a recipe: nested keys dotted, and the settings of each kind below the kind's own row."""
    for key, info in fields(model).items():
        if key == "name":
            continue
        yield _row(start + key, info)
        names: dict[type[Settings], list[str]] = {}
        for name, kind in kinds(info).items():
            names.setdefault(kind, []).append(name)
        for kind, called in names.items():
            yield f"{start + key}: {_code(*called)}", "", _sentence(kind.__doc__)
            yield from recipe_rows(kind, f"{start}{key}.")
        if not names and isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield from recipe_rows(info.annotation, f"{start}{key}.")


def placement_rows() -> Iterator[Row]:
    """Every setting of a placement, by what it may change."""
    for group, meaning in _GROUPS.items():
        yield f"**{group}**", "", meaning
        for key in keys(group):
            yield _row(key, Placement.model_fields[key])


def table(rows: Iterator[Row]) -> str:
    """Rows as a Markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def renewed(text: str, rows: Iterator[Row]) -> str:
    """A page with a new table between its two markers."""
    fresh = table(rows)
    page, count = _BETWEEN.subn(lambda match: match[1] + fresh + match[2], text)
    assert count == 1, "a page has the two markers once"
    return page


def _row(key: str, info: FieldInfo) -> Row:
    values = list(choices(info.annotation))
    closed = not any(value is None or isinstance(value, bool) for value in values)
    listed = f" One of {_code(*values)}." if closed else ""
    return _code(key), _default(info), _sentence(info.description) + listed


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Settings):
        name = getattr(value, "name", None)
        return _code(name) if name else ""
    if value is None or value == "":
        return "none"
    return _code(value)


def _code(*values: Any) -> str:
    return ", ".join(f"`{_text(value)}`" for value in values)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    here = Path(__file__).parent
    for name, rows in (("recipes.md", recipe_rows()), ("placements.md", placement_rows())):
        page = here / name
        page.write_text(renewed(page.read_text(), rows))
