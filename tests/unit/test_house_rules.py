"""The house rules of the design, held by reading the sources themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
BANNED = {"util", "utils", "helper", "helpers", "common", "manager", "handler", "misc", "cfg"}
UNKEYED = {"numpy.random", "random", "secrets"}
UNKEYED_CALLS = re.compile(
    r"\b(?:np|numpy)\.random\b|\btorch\.(?:rand\w*|normal|bernoulli|multinomial|manual_seed|seed|Generator)\b"
    r"|\.(?:normal_|uniform_|random_|bernoulli_)\("
)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def identifiers_of(path: Path) -> Iterator[str]:
    """Every name that a file gives: to functions, classes, arguments, variables, attributes and imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def words_of(identifier: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


@each_file
def test_no_file_is_over_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@each_file
def test_no_function_is_over_60_lines(path: Path) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 60
    ]
    assert long == []


@each_file
def test_every_file_opens_with_a_sentence_on_what_it_is_for(path: Path) -> None:
    doc = ast.get_docstring(tree_of(path))
    assert doc
    first = doc.partition("\n\n")[0]
    assert first.endswith((".", "?", "!"))
    assert len(first.split()) > 3


@each_file
def test_every_public_function_and_class_has_a_docstring(path: Path) -> None:
    bare = [
        node.name
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


@each_file
def test_names_are_words_that_say_something(path: Path) -> None:
    named = [path.stem, *path.relative_to(SOURCE).parent.parts, *identifiers_of(path)]
    assert [name for name in named if words_of(name) & BANNED] == []
    classes = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if name.startswith("Base")] == []


@each_file
def test_nothing_is_left_to_do(path: Path) -> None:
    assert re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", path.read_text()) == []


@each_file
def test_only_the_world_knows_of_other_processes(path: Path) -> None:
    distributed = {name for name in imports_of(path) if name.startswith(("torch.distributed", "torch._C._distributed"))}
    assert not distributed or name_of(path) == "world.py"


@each_file
def test_every_random_number_is_keyed(path: Path) -> None:
    assert imports_of(path) & UNKEYED == set()
    assert UNKEYED_CALLS.findall(path.read_text()) == []


def test_the_training_loop_is_under_80_lines() -> None:
    assert len((SOURCE / "train" / "loop.py").read_text().splitlines()) < 80


def test_the_rules_see_every_file() -> None:
    assert {"keyed.py", "world.py", "train/loop.py", "model/resnet.py"} <= {name_of(path) for path in FILES}


@pytest.mark.parametrize(
    ("identifier", "words"),
    [("norm_act", {"norm", "act"}), ("MakeNorm", {"make", "norm"}), ("_HTTPHandler2", {"http", "handler"})],
)
def test_identifiers_are_read_as_words(identifier: str, words: set[str]) -> None:
    assert words_of(identifier) == words
