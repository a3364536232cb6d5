"""The address of every setting, and what is there."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from paceline.settings.placement import Placement
from paceline.settings.recipe import Recipe
from paceline.settings.schema import addresses, fields, groups
from paceline.settings.types import Settings


def all_addresses() -> list[str]:
    """Every word before a '=' that a recipe and a placement know."""
    return [*addresses(Recipe), *(f"on.{key}" for key in addresses(Placement))]


def fields_at(address: str) -> list[FieldInfo]:
    """The settings that an address leads to, through some kind wherever there are several; none if it leads nowhere."""
    models: set[type[Settings]] = {Placement if address.startswith("on.") else Recipe}
    infos = list[FieldInfo]()
    for step in address.removeprefix("on.").split("."):
        infos = [fields(kind)[step] for kind in models if step in fields(kind)]
        models = {kind for info in infos for kind in groups(info.annotation)}
    return infos
