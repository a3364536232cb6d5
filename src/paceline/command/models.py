"""paceline models: every network, or one with its settings."""

from __future__ import annotations

import typing
from dataclasses import asdict
from typing import Any

from paceline import spec
from paceline.command.show import show_facts, show_rows
from paceline.errors import SpecError
from paceline.model import tables
from paceline.recipe import Recipe


def run(name: str | None, as_json: bool) -> None:
    """List the networks, or print one's settings and defaults."""
    if name is None:
        rows = [
            {key: row[key] for key in ("name", "parameters", "classes", "side")} for row in map(asdict, tables.MEMBERS)
        ]
        show_rows(rows, as_json)
        return
    known = spec.kinds(Recipe.model_fields["model"])
    if name not in known:
        raise SpecError(f"no model is named '{name}'{spec.nearest(name, list(known))}")
    facts = {key: value for key, value in asdict(tables.member(name)).items() if key != "name"}
    if as_json:
        show_facts({"name": name, **facts, "settings": settings_of(known[name])}, as_json=True)
        return
    show_facts(facts, as_json=False, title=name)
    print(f"\nSettings, written as model.KEY=VALUE or under 'model:' with name: {name}\n")
    show_rows(settings_of(known[name]), as_json=False)


def settings_of(kind: type[spec.Settings]) -> list[dict[str, Any]]:
    """Each setting of a kind: its key, default, choices and meaning."""
    return [
        {
            "key": key,
            "default": info.default,
            "choices": ", ".join(map(str, typing.get_args(info.annotation)))
            or getattr(info.annotation, "__name__", ""),
            "meaning": " ".join((info.description or "").split()),
        }
        for key, info in kind.model_fields.items()
        if key != "name"
    ]
