"""paceline recipes: what can be trained by name, or one page of it to copy and edit."""

from __future__ import annotations

import json
from typing import Any

from paceline import shipped, spec
from paceline.command.show import show_rows
from paceline.recipe import Recipe


def run(name: str | None, as_json: bool) -> None:
    """List the shipped recipes, or print one."""
    if name is None:
        show_rows([row(each) for each in shipped.names("recipes")], as_json)
    elif as_json:
        settings = spec.build(Recipe, shipped.tree("recipes", name))
        print(json.dumps({"name": name, **json.loads(settings.model_dump_json())}, indent=1))
    else:
        print(shipped.page("recipes", name)[0], end="")


def row(name: str) -> dict[str, Any]:
    """One line about a recipe."""
    recipe = spec.build(Recipe, shipped.tree("recipes", name))
    return {
        "name": name,
        "model": recipe.model.name,
        "data": recipe.data.name if recipe.data else "any",
        "global_batch": recipe.global_batch,
        "epochs": recipe.epochs,
        "about": recipe.about,
    }
