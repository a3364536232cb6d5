"""What is said of wrong settings: one line with the place, the key, what is wrong and what to write instead."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from paceline.settings.read import KeyPath, Tree, cut, flow, quoted
from paceline.settings.schema import addresses, fields, groups, kinds
from paceline.settings.suggest import NOTHING, elsewhere, instead_of_key, instead_of_value, nearest_kind
from paceline.settings.types import Settings


def describe(
    fault: ValidationError, tree: Tree, values: dict[str, Any], model: type[Settings], beside: Sequence[str]
) -> str:
    """The first fault of some settings as one line, and how many more there are."""
    # What is written wrongly comes before what is missing: a misspelled key is often both.
    errors = sorted(fault.errors(include_url=False), key=lambda error: error["type"] == "missing")
    first = errors[0]
    message = _message(first, tree, values, model, beside)
    missing = [error["loc"] for error in errors if error["type"] == first["type"] == "missing"]
    also = [loc[-1] for loc in missing[1:] if loc[:-1] == first["loc"][:-1] and isinstance(loc[-1], str)]
    more = len(errors) - 1 - len(also)
    return message + "".join(f", '{key}'" for key in also) + (f" (and {more} more)" if more else "")


def _message(error: Any, tree: Tree, values: dict[str, Any], model: type[Settings], beside: Sequence[str]) -> str:
    path, around, choices = _locate(error["loc"], model)
    key_is_wrong = error["type"] in ("missing", "extra_forbidden")
    section = path[:-1] if key_is_wrong else path
    noun = _noun(section, values, model)
    if error["type"] == "extra_forbidden":
        what = _unknown(path, noun, around, [*addresses(model, values), *beside], model)
    else:
        what = _complaint(error, path, noun, around, choices)
    address = cut(".".join(map(str, section)))
    name_is_wrong = choices and error["type"] in ("union_tag_invalid", "value_error")
    place = tree.place((*path, "name") if name_is_wrong else path)
    return f"{place}: {address + ': ' if address and not (key_is_wrong and address == noun) else ''}{what}"


def _noun(section: KeyPath, values: Any, model: type[Settings]) -> str:
    """What to call a section: the kind that it names, else its key, else the whole page."""
    for step in section:
        values = values.get(step) if isinstance(values, dict) else None
    name = values.get("name") if section and isinstance(values, dict) else None
    return str(name or (section[-1] if section else model.__name__.lower()))


def _locate(loc: KeyPath, model: type[Settings]) -> tuple[KeyPath, type[Settings] | None, list[str]]:
    """The key path of an error, the settings around it, and the names it could have chosen from.

    pydantic's place holds the chosen kind's name as an extra step, which the file does not have.
    """
    path: KeyPath = ()
    around: type[Settings] | None = model
    choices: dict[str, type[Settings]] = {}
    for step in loc:
        if step in choices:
            around, choices = choices[str(step)], {}
            continue
        info = fields(around).get(str(step)) if around and not choices else None
        path = (*path, step)
        if info is not None:
            choices = kinds(info)
            inside = list(groups(info.annotation))
            if len(inside) == 1 and len(loc) > len(path) and loc[len(path)] not in choices:
                choices = {}
            around = inside[0] if len(inside) == 1 and not choices else around
    return path, around, list(choices)


def _unknown(
    path: KeyPath, noun: str, around: type[Settings] | None, possible: Sequence[str], model: type[Settings]
) -> str:
    """What is said of a key that is not there; `possible` are the addresses that these settings can have."""
    section, key = ".".join(map(str, path[:-1])), str(path[-1])
    if any(address.startswith(f"{key}.") for address in possible):
        return (
            f"{noun} has no {quoted(key)}; put its keys into a file given with --{key} FILE, or write {key}.KEY=VALUE"
        )
    # A key that another kind has at this very place is not meant to stand elsewhere.
    other_kind = ".".join(map(str, path)) in addresses(model)
    keys = list(fields(around)) if around else []
    known = section or key in NOTHING or elsewhere(key, possible)
    if not known and (theirs := elsewhere(key, addresses(model))):
        return f"{noun} has no {quoted(key)}; other kinds have '{theirs[0]}': {_kinds_with(model, theirs[0])}"
    return f"{noun} has no {quoted(key)}{instead_of_key(key, section, keys, [] if other_kind else possible)}"


def _kinds_with(model: type[Settings], address: str) -> str:
    """Some names of the kinds that have a key."""
    section, _, key = address.partition(".")
    names = [name for name, kind in kinds(fields(model)[section]).items() if key in fields(kind)]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _complaint(error: Any, path: KeyPath, noun: str, around: type[Settings] | None, choices: list[str]) -> str:
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return _missing(path, noun, around)
    if kind == "union_tag_invalid":
        return _unknown_kind(str(value.get("name") if isinstance(value, dict) else value), path, choices)
    if kind in ("dict_type", "model_attributes_type") and choices:
        return f"expected a name, such as {' or '.join(choices[:4])}, found {quoted(value)}"
    if kind == "union_tag_not_found":
        return f"expected 'name: ...' with one of {', '.join(choices)}"
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"expected {' or '.join(expected)}, found {quoted(value)}{instead_of_value(str(value), expected)}"
    if kind == "value_error":
        return cut(str(error["ctx"]["error"]), most=500)
    if kind.startswith("model_") and around:
        write = [f"{'.'.join(map(str, path))}.{key}" for key in _fitting(around, value)]
        return f"this is a section with keys of its own, found {quoted(value)}; write {' or '.join(write)}"
    for start, words in _EXPECTED.items():
        if kind.startswith(start):
            return f"expected {words}, found {quoted(value)}{_as_list(value, path, around)}"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, found {quoted(value)}"


def _as_list(value: Any, path: KeyPath, around: type[Settings] | None) -> str:
    """How one text is added to the list that a setting is by default, if it is one."""
    info = fields(around).get(str(path[-1])) if around and path else None
    default = info.default if info is not None else None
    texts = [*default, value] if isinstance(default, tuple) and default else []
    added = flow(texts).replace(", ", ",")
    return f"; to add it write {cut(added)}" if texts and all(isinstance(text, str) for text in texts) else ""


def _missing(path: KeyPath, noun: str, around: type[Settings] | None) -> str:
    """What is said of a key that is missing, and how it may be written, where its declaration gives an example."""
    last = path[-1]
    if not isinstance(last, str):
        return f"expected more than {last} values in this list"
    info = fields(around).get(last) if around else None
    value = flow(info.examples[0]) if info is not None and info.examples else ""
    written = json.dumps(value) if " " in value else value
    return f"{noun} needs '{last}'" + (f", such as {'.'.join(map(str, path))}={written}" if value else "")


def _unknown_kind(name: str, path: KeyPath, choices: list[str]) -> str:
    """What is said of a kind that there is not; a folder is often written for the name of a data set."""
    if path == ("data",) and os.path.isdir(name):  # noqa: PTH112 - Path would raise where it may not look
        return f"{quoted(name)} is a folder, not the name of a data set; write --data {cut(name)} in its place"
    unlike = path == ("data",) and not instead_of_value(name, choices)
    folder = "; a folder of images is given by --data FOLDER" if unlike else ""
    return f"no {path[-1]} is named {quoted(name)}{nearest_kind(name, choices)}{folder}"


def _fitting(around: type[Settings], value: Any) -> list[str]:
    """The first keys of a section that take the value, as they would be written; else its first keys."""
    fitting = []
    for key in fields(around):
        try:
            around.model_validate_json(json.dumps({key: value}))
        except ValidationError:
            continue
        fitting.append(f"{key}={cut(flow(value))}")
    return fitting[:3] or [f"{key}=..." for key in list(fields(around))[:3]]


_EXPECTED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "text",
    "tuple_": "a list, such as [a, b]",
    "list_": "a list, such as [a, b]",
    "dict_": "'key: value' lines",
}
