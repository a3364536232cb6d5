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


BORROWED = {"model/external.py": ["torch.random", "torch.manual_seed"]}
"""A network of another package draws its first weights from torch's generator: there it is seeded by the recipe, and
put back afterwards."""


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


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file and its number of lines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_file_is_over_400_lines() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_function_is_over_60_lines() -> None:
    lines = {f"{name_of(path)}: {name}": count for path in FILES for name, count in functions_of(path)}
    assert {name: count for name, count in lines.items() if count > 60} == {}


def test_every_file_opens_with_a_sentence_on_what_it_is_for() -> None:
    openings = {name_of(path): (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0] for path in FILES}
    assert [name for name, text in openings.items() if not text.endswith(".") or len(text.split()) < 4] == []


def test_every_public_function_and_class_has_a_docstring() -> None:
    bare = [
        f"{name_of(path)}: {node.name}"
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


def test_names_are_words_that_say_something() -> None:
    named = {
        (name_of(path), name) for path in FILES for name in (*path.relative_to(SOURCE).parts, *identifiers_of(path))
    }
    assert sorted(where for where in named if words_of(where[1]) & BANNED) == []
    assert sorted(where for where in named if where[1].startswith("Base")) == []


def test_nothing_is_left_to_do() -> None:
    assert [name_of(path) for path in FILES if re.search(r"\b(?:TODO|FIXME|XXX|HACK)\b", path.read_text())] == []


def test_only_the_world_knows_of_other_processes() -> None:
    starts = ("torch.distributed", "torch._C._distributed")
    users = {name_of(path) for path in FILES if any(name.startswith(starts) for name in imports_of(path))}
    assert users == {"world.py", "pipelining.py", "rendezvous.py", "elastic.py", "fake_world.py"}


def test_every_random_number_is_keyed() -> None:
    assert [name_of(path) for path in FILES if imports_of(path) & UNKEYED] == []
    assert {name_of(path): found for path in FILES if (found := UNKEYED_CALLS.findall(path.read_text()))} == BORROWED


def test_the_borrowed_generator_is_put_back() -> None:
    source = (SOURCE / "model/external.py").read_text()
    forks = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.With) and "torch.random.fork_rng" in ast.unparse(node.items[0])
    ]
    assert len(forks) == 1
    assert source.count("manual_seed") == forks[0].count("manual_seed") == 1


def test_the_training_loop_is_under_80_lines() -> None:
    assert len((SOURCE / "training" / "loop.py").read_text().splitlines()) < 80


def test_the_rules_see_every_file() -> None:
    assert {"keyed.py", "world.py", "training/loop.py", "model/resnet.py"} <= {name_of(path) for path in FILES}


@pytest.mark.parametrize(
    ("identifier", "words"),
    [("norm_act", {"norm", "act"}), ("MakeNorm", {"make", "norm"}), ("_HTTPHandler2", {"http", "handler"})],
)
def test_identifiers_are_read_as_words(identifier: str, words: set[str]) -> None:
    assert words_of(identifier) == words


PROTOCOLS = (
    "cli.py",
    "api.py",
    "worker.py",
    "command/",
    "data/index/formats/",
    "model/kernels/rows",
    "model/kernels/gram",
    "model/kernels/pool",
    "model/kernels/windows",
    "model/kernels/expand",
    "model/kernels/gate",
    "model/kernels/product",
)
"""Modules that define the same names on purpose: verbs and the functions named after them, formats of one protocol,
and kernels and their plain twins."""


def exports_of(path: Path) -> Iterator[str]:
    """The public functions, classes and values that a module defines at its top."""
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_no_two_modules_export_one_name() -> None:
    modules: dict[str, list[str]] = {}
    for path in FILES:
        if not name_of(path).startswith(PROTOCOLS):
            for name in set(exports_of(path)):
                if not name.startswith("_"):
                    modules.setdefault(name, []).append(name_of(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
