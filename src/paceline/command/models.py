"""paceline models: every network, or one with its settings or its blocks."""

from __future__ import annotations

import typing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.command.tables import show_facts, show_rows
from paceline.errors import PlanError, SpecError
from paceline.facts import DataFacts
from paceline.model import tables
from paceline.settings.build import build
from paceline.settings.read import override, parse
from paceline.settings.recipe import Recipe
from paceline.settings.schema import fields
from paceline.settings.types import Settings

if TYPE_CHECKING:
    from paceline.model.cost import BlockCost

_UNSHOWN = ("name", "class_parameters")
"""What the tables say of a network that people need not see."""
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
        facts = {key: value for key, value in asdict(tables.member(recipe.model.name)).items() if key not in _UNSHOWN}
        if words:
            costs = _costs(recipe, facts["side"])
            facts["parameters"] = sum(cost.parameters for cost in costs)
            facts["activations"] = sum(cost.activation_bytes for cost in costs) // 4
    if as_json:
        show_facts({"name": name, **facts, "settings": settings_of(kind)}, as_json=True)
        return
    show_facts(facts, as_json=False, title=name)
    print(f"\nSettings, written as model.KEY=VALUE or under 'model:' with name: {name}\n")
    show_rows(settings_of(kind), as_json=False)


def _show_blocks(recipe: Recipe, side: int | None, as_json: bool) -> None:
    rows = [asdict(cost) for cost in _costs(recipe, side)]
    total = {key: "all" if key == "name" else sum(row[key] for row in rows) for key in rows[0]}
    show_rows([*rows, total], as_json)


def _costs(recipe: Recipe, side: int | None) -> list[BlockCost]:
    """What each block of a network costs, for images of this side or of its own."""
    native = next((row for row in tables.MEMBERS if row.name == recipe.model.name), tables.member("resnet50"))
    facts = DataFacts(1, 1, native.classes, side or native.side)
    smallest = tables.smallest_side(recipe.model)
    if facts.side < smallest:
        raise PlanError(f"{recipe.model.name} needs images of at least {smallest} pixels a side, not {facts.side}")
    from paceline.model.cost import block_costs

    return block_costs(recipe, facts)


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
