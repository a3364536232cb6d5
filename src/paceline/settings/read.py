"""YAML text and KEY=VALUE words become a tree of plain values that knows where each was written, and back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from paceline.errors import SpecError
from paceline.settings.page import DEEPEST, MOST_VALUES, compose, too_many
from paceline.settings.schema import fields, groups, kinds
from paceline.settings.types import Settings
from paceline.visible import one_line

KeyPath = tuple[str | int, ...]


@dataclass
class Tree:
    """Settings as they were written: plain values, and for each key the place it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where the value at `path`, or else the first thing in it or the nearest thing around it, was written."""
        if path in self.places:
            return self.places[path]
        around = [path[:end] for end in range(len(path), -1, -1)]
        inside = [other for other in self.places if path and other[: len(path)] == path]
        return next((self.places[each] for each in (*inside, *around) if each in self.places), "settings")

    def forget(self, *paths: KeyPath) -> None:
        """Drop the places of the values at `paths` and of all that is in them."""
        gone, lengths = set(paths), {len(path) for path in paths}
        self.places = {
            path: place for path, place in self.places.items() if not any(path[:length] in gone for length in lengths)
        }


def parse(text: str, name: str) -> Tree:
    """The settings in a YAML text; `name` stands for the file in messages."""
    name = one_line(name)
    tree = Tree(places={(): name})
    try:
        node = compose(text, name)
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else 1
        raise SpecError(f"{name}:{line}: this is not YAML: {fault.problem}") from None
    except yaml.YAMLError:
        raise SpecError(f"{name}:1: this is not YAML: it holds characters that no text has") from None
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(f"{name}:1: expected 'key: value' lines, found {quoted(_plain(node, tree, (), name))}")
    tree.values = _plain(node, tree, (), name)
    return tree


def override(tree: Tree, word: str, model: type[Settings], prefix: str = "") -> None:
    """Put one KEY=VALUE word, less its prefix, into the tree; another kind's name drops the old kind's keys."""
    place = f"'{cut(word)}'"
    address, equals, text = word.removeprefix(prefix).partition("=")
    path = tuple(address.split("."))
    if not _is_text(word) or len(path) > DEEPEST:
        raise SpecError(f"{place}: {'no setting lies so deep' if _is_text(word) else 'this is not UTF-8 text'}")
    if not equals or not all(path):
        hint = f"; for a folder of images write --data {word}" if not equals and os.path.isdir(word) else ""  # noqa: PTH112
        if not equals and word.endswith((",", "]", "}")):
            hint = "; a word with spaces in it needs quotes, as in 'freeze=[stem, stage1]'"
        raise SpecError(f"{place}: expected key=value, such as epochs=20 or optimizer.lr=0.2{hint}")
    section = tree.values
    for key in path[:-1]:
        if isinstance(section.get(key), str):
            section[key] = {"name": section[key]}
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise SpecError(f"{place}: '{key}' is a single value and has no keys of its own")
    written = Tree()
    try:
        value = _plain(compose(text, place), written, path, place) if text else None
    except yaml.YAMLError:
        value = text
    if path[-1] == "name" and section.get("name") not in (None, value):
        _drop_old_kind(tree, section, path[:-1], str(value), model)
    section[path[-1]] = value
    tree.forget(path)
    tree.places.update(dict.fromkeys([path, *written.places], place))


def dump(settings: Settings, places: Tree | None = None, indent: str = "") -> str:
    """The settings as YAML, every key written out; with `places`, each line says where its value came from."""
    chosen = dict(_leaves(json.loads(settings.model_dump_json(exclude_defaults=True)), ()))
    values = json.loads(settings.model_dump_json())
    return "".join(f"{indent}{line}\n" for line in _lines(values, places, set(chosen), ()))


def values_by_address(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Every value of the settings by its address, such as optimizer.lr."""
    leaves = _leaves(json.loads(settings.model_dump_json()), ())
    return {prefix + ".".join(map(str, path)): value for path, value in leaves}


def changes(old: Settings, new: Settings) -> list[str]:
    """What differs between two settings of one kind, one 'key: old -> new' each."""
    before, after = (dict(_leaves(json.loads(s.model_dump_json()), ())) for s in (old, new))
    return [
        f"{'.'.join(map(str, path))}: {quoted(before.get(path))} -> {quoted(after.get(path))}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def flow(value: Any) -> str:
    """A value on one line, quoted where this reader would take its text for something else."""
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str) and _scalar(value) != value:
        return f"'{value}'"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def quoted(value: Any) -> str:
    """A value as messages quote it, cut if it is very long."""
    return f"'{cut(value)}'" if isinstance(value, str) else cut(json.dumps(value))


def cut(text: str, most: int = 200) -> str:
    """A text as messages show it: on one line, and cut if it is very long."""
    return one_line(text if len(text) <= most else f"{text[: most // 2]}...")


def _is_text(word: str) -> bool:
    """Whether a word can be written to a file: bytes that are not UTF-8 come as halves of characters."""
    return not re.search("[\0\ud800-\udfff]", word)


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 300
"""Longer numbers stay text: not even a float holds them."""
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain(node: yaml.Node | None, tree: Tree, path: KeyPath, name: str) -> Any:
    """A YAML node as plain values; only true, false, null and numbers are more than text."""
    if node is None:
        return None
    if len(path) > DEEPEST:
        raise SpecError(f"{name}: settings nest too deeply at {cut('.'.join(map(str, path)))}")
    if len(tree.places) > MOST_VALUES:
        raise too_many(name)
    tree.places[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value:
            raise SpecError(f"{tree.places[path]}: a zero byte is no text")
        return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, tree, (*path, i), name) for i, child in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key, child in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            raise SpecError(f"{name}:{key.start_mark.line + 1}: a key must be a plain word")
        if key.value in values:
            raise SpecError(f"{name}:{key.start_mark.line + 1}: {quoted(key.value)} is written twice; keep one of them")
        values[key.value] = _plain(child, tree, (*path, key.value), name)
        tree.places[(*path, key.value)] = f"{name}:{key.start_mark.line + 1}"
    return values


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MOST_DIGITS:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _drop_old_kind(tree: Tree, section: dict[str, Any], path: KeyPath, name: str, model: type[Settings]) -> None:
    """Drop what the file said of the kind chosen before; what another override said stays, and is checked."""
    choices: dict[str, type[Settings]] = {}
    group: type[Settings] | None = model
    for key in path:
        info = fields(group).get(str(key)) if group else None
        choices = kinds(info) if info else {}
        group = choices.get(name) or (next(groups(info.annotation), None) if info else None)
    if choices:
        keys = fields(choices[name]) if name in choices else {}
        gone = [key for key in section if key not in keys and not tree.place((*path, key)).startswith("'")]
        for key in gone:
            del section[key]
        tree.forget(*((*path, key) for key in gone))


def _leaves(values: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, values


def _lines(values: dict[str, Any], places: Tree | None, chosen: set[KeyPath], path: KeyPath) -> Iterator[str]:
    for key, value in values.items():
        here = (*path, key)
        pad = "  " * len(path)
        if isinstance(value, dict) and value:
            yield f"{pad}{flow(key)}:"
            yield from _lines(value, places, chosen, here)
        else:
            line = f"{pad}{flow(key)}: {flow(value)}"
            if places is not None:
                # A value that is not its default and was not written came with the name of its kind.
                source = here if here in places.places else (*path, "name") if here in chosen else None
                line = f"{line:<48}  # {places.place(source) if source else 'default'}"
            yield line
