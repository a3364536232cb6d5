"""paceline recipes: what can be trained by name, or one page of it to copy and edit."""

from __future__ import annotations

import json
from typing import Any

import yaml

from paceline.command.tables import by_numbers, show_line, show_listing
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.configurations import configurations
from paceline.settings.recipe import Recipe

# The C parser reads all pages in the time in which the other one reads a few.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_LEAST = ("placements", "source", "model", "data", "global_batch", "published", "epochs")
"""The columns that a narrow terminal does without, the first of them first; a name says most of it."""


def run(name: str | None, everything: bool, as_json: bool) -> None:
    """List Paceline's own recipes, all, or those of one system; or print one."""
    names = shipped.names("recipes")
    listed = names if everything else [each for each in names if each.startswith(f"{name}/")]
    if name is None or listed:
        listed = listed or shipped.own_names("recipes")
        rows = [row(each) for each in sorted(listed, key=by_numbers)]
        if as_json:
            print(json.dumps(rows, indent=1))
            return
        show_listing(rows, _LEAST)
        if name is None and not everything:
            published = sorted(set(names) - set(listed))
            systems = ", ".join(sorted({each.partition("/")[0] for each in published}))
            show_line(f"\n{len(published)} more were published by others ({systems}).")
            show_line("List them with: paceline recipes --all, or: paceline recipes nvidia")
    elif as_json:
        settings = build(Recipe, shipped.tree("recipes", name))
        print(json.dumps({"name": name, **json.loads(settings.model_dump_json())}, indent=1))
    else:
        text, found = shipped.page("recipes", name)
        print(text, end="")
        for placement in placements_of(found):
            print(f"# published with --on {placement}")


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
        "placements": placements_of(name),
    }


def placements_of(recipe: str) -> list[str]:
    """The placements that a recipe was published with."""
    return list(dict.fromkeys(each.placement for each in configurations() if each.recipe == recipe and not each.batch))


def _kind(written: str | dict[str, Any]) -> str:
    """A bare name is short for a kind with its defaults."""
    return written if isinstance(written, str) else written["name"]
