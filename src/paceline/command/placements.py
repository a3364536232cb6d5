"""paceline placements: where recipes can run by name, what older systems called it, or one page of it."""

from __future__ import annotations

import json
from typing import Any

from paceline.command.tables import by_numbers, show_listing
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.configurations import configurations
from paceline.settings.placement import Placement

_LEAST = ("precision", "micro_batch", "replicas", "recipes", "older_name")
"""The columns that a narrow terminal does without, the first of them first."""


def run(name: str | None, as_json: bool) -> None:
    """List all placements, or those of one system; or print one."""
    names = shipped.names("placements")
    listed = names if name is None else [each for each in names if each.startswith(f"{name}/")]
    if listed:
        rows = [row(each) for each in sorted(listed, key=by_numbers)]
        if as_json:
            print(json.dumps(rows, indent=1))
        else:
            show_listing(rows, _LEAST)
        return
    assert name is not None, "some placements are shipped"
    text, found = shipped.page("placements", name)
    if as_json:
        settings = build(Placement, shipped.tree("placements", name))
        print(json.dumps({"name": found, **json.loads(settings.model_dump_json())}, indent=1))
    else:
        print(text, end="")


def row(name: str) -> dict[str, Any]:
    """One line about a placement: what it was called, what ran on it, and what it sets."""
    placement = build(Placement, shipped.tree("placements", name))
    known = [each for each in configurations() if each.placement == name]
    return {
        "name": name,
        "older_name": list(dict.fromkeys(each.name for each in known if each.name)),
        "hosts": max((each.hosts for each in known), default=""),
        "devices": max((each.devices for each in known), default=""),
        "recipes": list(dict.fromkeys(each.recipe for each in known)),
        "replicas": placement.replicas,
        "stages": placement.stages,
        "micro_batch": placement.micro_batch,
        "precision": placement.precision,
    }
