"""What settings exist: the keys of a group, the kinds that a key chooses from, and the address of every key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from paceline.settings.types import Settings


def fields(model: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of a group by the key they are written with."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def kinds(info: FieldInfo | Any) -> dict[str, type[Settings]]:
    """The groups that a field chooses from, by each name they answer to."""
    annotation = info.annotation if isinstance(info, FieldInfo) else info
    members = {}
    for group in groups(annotation):
        if "name" in group.model_fields:
            for name in typing.get_args(group.model_fields["name"].annotation):
                members[name] = group
    return members


def choices(annotation: Any) -> Iterator[Any]:
    """The values that an annotation lists; None for everything else in it."""
    if annotation is bool:
        yield from (True, False)
    elif typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from choices(part)
    else:
        yield None


def groups(annotation: Any) -> Iterator[type[Settings]]:
    """The groups of settings inside an annotation: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from groups(argument)


def addresses(model: type[Settings], values: Any = None, start: str = "") -> list[str]:
    """The address of every key; where a key chooses from kinds, of the kind that the values name, or else of all."""
    result = []
    for key, info in fields(model).items():
        section = values.get(key) if isinstance(values, dict) else None
        default = getattr(info.default, "name", None) if values else None
        kind = kinds(info).get(str(section.get("name") if isinstance(section, dict) else default))
        for group in [kind] if kind else groups(info.annotation):
            result += addresses(group, section, f"{start}{key}.")
        result += [start + key] if key != "name" else []
    return list(dict.fromkeys(result))


def named_kinds(values: Any, model: type[Settings]) -> dict[str, Any]:
    """Spell out kinds that are given by name alone: `optimizer: sgd` means `optimizer: {name: sgd}`."""
    if not isinstance(values, dict):
        return {}
    result = dict(values)
    for key, value in values.items():
        info = fields(model).get(key)
        if info is None:
            continue
        if isinstance(value, str) and kinds(info):
            result[key] = {"name": value}
        elif isinstance(value, dict):
            default = getattr(info.default, "name", None)
            section = {"name": default, **value} if kinds(info) and default else value  # keys alone: the default kind
            group = kinds(info).get(str(section.get("name"))) or next(groups(info.annotation), None)
            result[key] = named_kinds(section, group) if group else section
    return result
