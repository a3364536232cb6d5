"""YAML text and key=value words become checked settings; every fault says where it stands and what to write instead."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from paceline.errors import SpecError
from paceline.settings.suggest import nearest, nearest_key, nearest_value


class Settings(BaseModel):
    """A group of settings: frozen, strict, each with its one-sentence meaning as its docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


Path = tuple[str | int, ...]
Kind = TypeVar("Kind", bound=Settings)


@dataclass
class Tree:
    """Settings as they were written: plain values, and for each key the place it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where the value at `path`, or else the first thing in it or the nearest thing around it, was written."""
        around = [path[:end] for end in range(len(path), -1, -1)]
        inside = [known for known in self.places if path and known[: len(path)] == path]
        known = [each for each in (path, *inside, *around) if each in self.places]
        return self.places[known[0]] if known else "settings"


def read(text: str, name: str) -> Tree:
    """The settings in a YAML text; `name` stands for the file in messages."""
    tree = Tree(places={(): name})
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else 1
        raise SpecError(f"{name}:{line}: this is not YAML: {fault.problem}") from None
    except yaml.YAMLError:
        raise SpecError(f"{name}:1: this is not YAML: it holds characters that no text has") from None
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{name}:1: expected 'key: value' lines, found {_shown(_plain(node, tree, (), name))}")
    tree.values = _plain(node, tree, (), name)
    return tree


def override(tree: Tree, word: str, model: type[Settings], prefix: str = "") -> None:
    """Put one KEY=VALUE word into the tree, less its prefix; a new kind's name drops the old kind's unknown keys."""
    place = f"'{_cut(word)}'"
    address, equals, text = word.removeprefix(prefix).partition("=")
    path = tuple(address.split("."))
    if not equals or not all(path):
        raise SpecError(f"{place}: expected key=value, such as epochs=20 or optimizer.lr=0.2")
    section = tree.values
    for key in path[:-1]:
        if isinstance(section.get(key), str):
            section[key] = {"name": section[key]}
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise SpecError(f"{place}: '{key}' is a single value and has no keys of its own")
    written = Tree()
    try:
        value = _plain(yaml.compose(text, Loader=yaml.SafeLoader), written, path, place) if text else None
    except yaml.YAMLError:
        value = text
    if path[-1] == "name" and section.get("name") not in (None, value):
        _forget_other_kind(tree, section, path[:-1], str(value), model)
    if path[-1] == "network" and isinstance(section.get("name"), str):
        section["name"] = section["name"].partition(":")[0]  # the later of package:NAME and network=NAME counts
    elif path[-1] == "name" and ":" in str(value):
        section.pop("network", None)
    section[path[-1]] = value
    for old in [known for known in tree.places if known[: len(path)] == path]:
        del tree.places[old]
    tree.places.update(dict.fromkeys([path, *written.places], place))


def build(model: type[Kind], tree: Tree, beside: Sequence[str] = ()) -> Kind:
    """The checked settings of a tree, or a SpecError about the first thing wrong in it.

    An unknown key is looked for among all addresses of the model, and those `beside` it.
    """
    values = _name_kinds(tree.values, model)
    try:
        return model.model_validate_json(json.dumps(values))
    except ValidationError as fault:
        # What is written wrongly comes before what is missing: a misspelled key is often both.
        errors = sorted(fault.errors(include_url=False), key=lambda error: error["type"] == "missing")
        first = errors[0]
        message = _message(first, tree, values, model, beside)
        missing = [error["loc"] for error in errors if error["type"] == first["type"] == "missing"]
        also = [loc[-1] for loc in missing[1:] if loc[:-1] == first["loc"][:-1] and isinstance(loc[-1], str)]
        more = len(errors) - 1 - len(also)
        message += "".join(f", '{key}'" for key in also) + (f" (and {more} more)" if more else "")
        raise SpecError(message) from None


def dump(settings: Settings, places: Tree | None = None, indent: str = "") -> str:
    """The settings as YAML, every key written out; with `places`, each line says where its value came from."""
    return "".join(f"{indent}{line}\n" for line in _lines(json.loads(settings.model_dump_json()), places, ()))


def differences(old: Settings, new: Settings) -> list[str]:
    """What differs between two settings of one kind, one 'key: old -> new' each."""
    before, after = (dict(_leaves(json.loads(s.model_dump_json()), ())) for s in (old, new))
    return [
        f"{'.'.join(map(str, path))}: {_shown(before.get(path))} -> {_shown(after.get(path))}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def fields(model: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of a kind by the key they are written with."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def kinds(info: FieldInfo | Any) -> dict[str, type[Settings]]:
    """The settings classes that a field chooses between, by each name they answer to."""
    annotation = info.annotation if isinstance(info, FieldInfo) else info
    members = {}
    for part in _parts(annotation):
        if "name" in part.model_fields:
            for name in typing.get_args(part.model_fields["name"].annotation):
                members[name] = part
    return members


def addresses(model: type[Settings], values: Any = None, start: str = "") -> list[str]:
    """The address of every key; where kinds are chosen from, of the kind that the values name, or else of all."""
    found = []
    for key, info in fields(model).items():
        given = values.get(key) if isinstance(values, dict) else None
        name = given.get("name") if isinstance(given, dict) else getattr(info.default, "name", None) if values else None
        named = kinds(info).get(str(name))
        for part in [named] if named else _parts(info.annotation):
            found += addresses(part, given, f"{start}{key}.")
        found += [start + key] if key != "name" else []
    return list(dict.fromkeys(found))


def _parts(annotation: Any) -> Iterator[type[Settings]]:
    """The settings classes inside an annotation: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain(node: yaml.Node | None, tree: Tree, path: Path, name: str) -> Any:
    """A YAML node as plain values; only true, false, null and numbers are more than text."""
    if node is None:
        return None
    if len(path) > 12:
        raise SpecError(f"{name}: settings nest too deeply at {'.'.join(map(str, path))}")
    tree.places[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, tree, (*path, i), name) for i, child in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key, child in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            raise SpecError(f"{name}:{key.start_mark.line + 1}: a key must be a plain word")
        if key.value in values:
            raise SpecError(f"{name}:{key.start_mark.line + 1}: '{key.value}' is written twice; keep one of them")
        values[key.value] = _plain(child, tree, (*path, key.value), name)
        tree.places[(*path, key.value)] = f"{name}:{key.start_mark.line + 1}"
    return values


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        return int(text) if len(text) <= 4300 else text  # Python makes no number of more digits
    return float(text) if _NUMBER.fullmatch(text) else text


def _name_kinds(values: Any, model: type[Settings]) -> dict[str, Any]:
    """`optimizer: sgd` means `optimizer: {name: sgd}` wherever a kind is chosen by name."""
    if not isinstance(values, dict):
        return {}
    result = dict(values)
    for key, value in values.items():
        info = fields(model).get(key)
        if info is None:
            continue
        if isinstance(value, str) and kinds(info):
            result[key] = _of_package({"name": value}, kinds(info))
        elif isinstance(value, dict):
            chosen = getattr(info.default, "name", None)
            given = {"name": chosen, **value} if kinds(info) and chosen else value  # keys alone are the default kind's
            given = _of_package(given, kinds(info))
            named = kinds(info).get(str(given.get("name")))
            inner = named or next(_parts(info.annotation), None)
            result[key] = _name_kinds(given, inner) if inner else given
    return result


def _of_package(given: dict[str, Any], choices: dict[str, type[Settings]]) -> dict[str, Any]:
    """`timm:NAME` means the kind `timm` and its `network` NAME; beside a `network` it is one too many."""
    package, colon, network = str(given.get("name")).partition(":")
    if colon and "network" not in given and package in choices and "network" in choices[package].model_fields:
        return {**given, "name": package, "network": network}
    return given


def _forget_other_kind(tree: Tree, section: dict[str, Any], path: Path, name: str, model: type[Settings]) -> None:
    """Drop what the file said of the kind chosen before; what another override said stays, and is checked."""
    choices: dict[str, type[Settings]] = {}
    inner: type[Settings] | None = model
    name = name.partition(":")[0]
    for key in path:
        info = fields(inner).get(str(key)) if inner else None
        choices = kinds(info) if info else {}
        inner = choices.get(name) or (next(_parts(info.annotation), None) if info else None)
    if name in choices:
        for key in [key for key in section if key not in fields(choices[name])]:
            if not tree.place((*path, key)).startswith("'"):
                del section[key]


def _message(error: Any, tree: Tree, values: dict[str, Any], model: type[Settings], beside: Sequence[str]) -> str:
    """One pydantic error as one line: place, key, what is wrong, what to write."""
    path, around, choices = _locate(error["loc"], values, model)
    if error["type"] == "extra_forbidden":
        # A key that another kind has at this very place is not meant to stand elsewhere.
        other_kind = ".".join(map(str, path)) in addresses(model)
        what = _unknown(path, around, [] if other_kind else [*addresses(model, values), *beside])
    else:
        what = _complaint(error, path, around, choices)
    address = ".".join(map(str, path[:-1] if error["type"] in ("missing", "extra_forbidden") else path))
    place = tree.place((*path, "name") if error["type"] == "union_tag_invalid" else path)
    return f"{place}: {address + ': ' if address else ''}{what}"


def _locate(loc: Path, values: Any, model: type[Settings]) -> tuple[Path, type[Settings] | None, list[str]]:
    """The key path of an error, the settings around it, and the names it could have chosen from.

    pydantic's place holds the chosen kind's name as an extra step, which the file does not have.
    """
    path: Path = ()
    around: type[Settings] | None = model
    choices: dict[str, type[Settings]] = {}
    for step in loc:
        if step in choices:
            around, choices = choices[str(step)], {}
            continue
        info = fields(around).get(str(step)) if around and not choices else None
        path = (*path, step)
        if isinstance(values, dict):
            values = values.get(str(step))
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        if info is not None:
            choices = kinds(info)
            parts = list(_parts(info.annotation))
            if len(parts) == 1 and len(loc) > len(path) and loc[len(path)] not in choices:
                choices = {}
            around = parts[0] if len(parts) == 1 and not choices else around
    return path, around, list(choices)


def _unknown(path: Path, around: type[Settings] | None, known: Sequence[str]) -> str:
    section, key = ".".join(map(str, path[:-1])), str(path[-1])
    noun = around.__name__.lower() if around else "settings"
    if any(address.startswith(f"{key}.") for address in known):
        return f"{noun} has no '{key}'; put its keys into a file given with --{key} FILE, or write {key}.KEY=VALUE"
    return f"{noun} has no '{key}'{nearest_key(key, section, list(fields(around)) if around else [], known)}"


def _complaint(error: Any, path: Path, around: type[Settings] | None, choices: list[str]) -> str:
    kind, given = error["type"], error["input"]
    noun = around.__name__.lower() if around else "settings"
    last = path[-1] if path else ""
    if kind == "missing":
        return f"{noun} needs '{last}'" if isinstance(last, str) else f"expected more than {last} values in this list"
    if kind == "union_tag_invalid":
        name = str(given.get("name") if isinstance(given, dict) else given)
        return f"no {last} is named {_shown(name)}{nearest(name, choices)}"
    if kind == "dict_type" and choices:
        return f"expected a name, such as {' or '.join(choices[:4])}, found {_shown(given)}"
    if kind == "union_tag_not_found":
        return f"expected 'name: ...' with one of {', '.join(choices[:12])}"
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        hint = nearest_value(str(given), expected)
        return f"expected {' or '.join(expected)}, found {_shown(given)}{hint}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind.startswith("model_") and around:
        write = [f"{'.'.join(map(str, path))}.{key}" for key in _fitting(around, given)]
        return f"this is a section with keys of its own, found {_shown(given)}; write {' or '.join(write)}"
    for start, words in _EXPECTED.items():
        if kind.startswith(start):
            return f"expected {words}, found {_shown(given)}"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, found {_shown(given)}"


def _fitting(around: type[Settings], given: Any) -> list[str]:
    """The first keys of a section that could have the value, as they would be written; else its first keys."""
    fitting = []
    for key in fields(around):
        try:
            around.model_validate_json(json.dumps({key: given}))
        except ValidationError:
            continue
        fitting.append(f"{key}={flow(given)}")
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


def _shown(value: Any) -> str:
    return f"'{_cut(value)}'" if isinstance(value, str) else _cut(json.dumps(value))


def _cut(text: str) -> str:
    """Only as much of a very long text as a line can show."""
    return text if len(text) <= 200 else f"{text[:100]}..."


def _leaves(values: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, values


def flow(value: Any) -> str:
    """A value on one line, quoted where this reader would take its text for something else."""
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str) and _scalar(value) != value:
        return f"'{value}'"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _lines(values: dict[str, Any], places: Tree | None, path: Path) -> Iterator[str]:
    for key, value in values.items():
        here = (*path, key)
        pad = "  " * len(path)
        if isinstance(value, dict) and value:
            yield f"{pad}{key}:"
            yield from _lines(value, places, here)
        else:
            line = f"{pad}{key}: {flow(value)}"
            if places is not None:
                here = (*path, "name") if key == "network" and _in_name(places.values, path) else here
                written = here in places.places or (here[-1] == "name" and path in places.places)
                line = f"{line:<48}  # {places.place(here) if written else 'default'}"
            yield line


def _in_name(values: Any, path: Path) -> bool:
    """Whether the kind at `path` was written as package:NAME."""
    for step in path:
        values = values.get(step) if isinstance(values, dict) else None
    return ":" in str(values.get("name") if isinstance(values, dict) else values)
