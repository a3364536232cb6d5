"""paceline models: every network, or one with its settings or its blocks."""

from __future__ import annotations

import typing
from dataclasses import asdict
from typing import Any

from paceline.command.tables import show_facts, show_rows
from paceline.errors import PlanError, SpecError
from paceline.facts import DataFacts
from paceline.model import tables
from paceline.settings.build import build
from paceline.settings.read import override, parse
from paceline.settings.recipe import Recipe
from paceline.settings.schema import fields
from paceline.settings.types import Settings

_PAGE = "{global_batch: 1, epochs: 1, optimizer: {name: sgd, lr: 0.1}, schedule: constant}"
"""What a recipe must say beside its model."""


def run(name: str | None, words: list[str], blocks: bool, side: int | None, as_json: bool) -> None:
    """List the networks, or print one's settings and defaults, or its blocks with what they cost."""
    if side is not None and not blocks:
        raise SpecError("--side is the image side for --blocks; write both")
    if name is None:
        if blocks:
            raise SpecError(
                "--blocks prints those of one network; write its name, as in paceline models resnet50 --blocks"
            )
        rows = [
            {key: row[key] for key in ("name", "parameters", "classes", "side", "smallest_side")}
            for row in map(asdict, tables.MEMBERS)
        ]
        show_rows(rows, as_json)
        return
    tree = parse(_PAGE, "models")
    for word in [f"model={name}", *words]:
        override(tree, word, Recipe)
    recipe = build(Recipe, tree)
    if blocks:
        _show_blocks(recipe, side, as_json)
        return
    kind = type(recipe.model)
    facts = {}
    if recipe.model.name in {row.name for row in tables.MEMBERS}:
        facts = {key: value for key, value in asdict(tables.member(recipe.model.name)).items() if key != "name"}
    if as_json:
        show_facts({"name": name, **facts, "settings": settings_of(kind)}, as_json=True)
        return
    show_facts(facts, as_json=False, title=name)
    print(f"\nSettings, written as model.KEY=VALUE or under 'model:' with name: {name}\n")
    show_rows(settings_of(kind), as_json=False)


def _show_blocks(recipe: Recipe, side: int | None, as_json: bool) -> None:
    native = next((row for row in tables.MEMBERS if row.name == recipe.model.name), tables.member("resnet50"))
    facts = DataFacts(1, 1, native.classes, side or native.side)
    smallest = tables.smallest_side(recipe.model)
    if facts.side < smallest:
        raise PlanError(f"{recipe.model.name} needs images of at least {smallest} pixels a side, not {facts.side}")
    from paceline.model.cost import block_costs

    rows = [asdict(cost) for cost in block_costs(recipe, facts)]
    total = {key: "all" if key == "name" else sum(row[key] for row in rows) for key in rows[0]}
    show_rows([*rows, total], as_json)


def settings_of(kind: type[Settings]) -> list[dict[str, Any]]:
    """Each setting of a kind: its key, default, choices and meaning."""
    return [
        {
            "key": key,
            "default": "needed" if info.is_required() else info.default,
            "choices": _choices(info.annotation),
            "meaning": " ".join((info.description or "").split()),
        }
        for key, info in fields(kind).items()
        if key != "name"
    ]


def _choices(annotation: Any) -> str:
    """The values a setting can have, or what kind of value it takes."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(map(str, arguments))
    if typing.get_origin(annotation) is typing.Annotated:
        return _choices(arguments[0])
    return ", ".join(_choices(argument) for argument in arguments if argument is not type(None)) or annotation.__name__
