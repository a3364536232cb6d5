"""Recipes and placements that come with Paceline, found by name."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import SpecError
from paceline.settings.configurations import named, near
from paceline.settings.page import read_page
from paceline.settings.read import Tree, parse, quoted
from paceline.settings.suggest import is_near, nearest_name

_HERE = Path(__file__).parents[1]
_FILES = (".yaml", ".yml")


def names(kind: str) -> list[str]:
    """The names of all shipped 'recipes' or 'placements': SYSTEM/NAME for those that others published."""
    return sorted(_pages(kind))


def own_names(kind: str) -> list[str]:
    """The names of those that nobody else published."""
    return sorted(name for name, path in _pages(kind).items() if "published" not in path.parts)


def is_page(kind: str, word: str) -> bool:
    """Whether a word is the exact name of a shipped page, an older name of one, or that of a YAML file."""
    return Path(word).suffix in _FILES or word in _pages(kind) or bool(named(word))


def page(kind: str, word: str) -> tuple[str, str]:
    """The text of a shipped page or of a YAML file, and what to call it in messages."""
    path = Path(word)
    if path.suffix in _FILES:
        try:
            return read_page(path), word
        except (OSError, ValueError) as fault:
            raise SpecError(f"{word}: cannot be read: {getattr(fault, 'strerror', None) or 'it is not text'}") from None
    pages = _pages(kind)
    if word not in pages and (found := named(word)):
        word = found[0].recipe if kind == "recipes" else found[0].placement
    if word not in pages and kind == "recipes" and os.path.isdir(path):  # noqa: PTH112 - Path would raise where it may not look
        raise SpecError(
            f"'{word}' is a folder, not a recipe; to train on its images write: paceline train {word}; here write a "
            f"recipe's name and --data {word}"
        )
    if word not in pages:
        raise SpecError(f"no {kind.removesuffix('s')} is named {quoted(word)}{_instead(kind, word)}")
    return pages[word].read_text(), word


def _instead(kind: str, word: str) -> str:
    """What may be meant by a name that there is not: an older one that is near it, or one of ours."""
    if (older := near(word)) and not any(word in name for name in names(kind)):
        return f"; near it are {', '.join(each.name for each in older)}, of older systems"
    if kind == "recipes" and not is_near(word, names(kind)):  # rather a folder, misspelled
        first = sorted(own_names(kind), key=lambda name: (not name.startswith("images/"), name))
        return f", and no folder is there; there is {', '.join(first)}; paceline recipes --all lists all"
    instead = nearest_name(word, names(kind))
    return (
        f"{instead}; paceline {kind}{' --all' if kind == 'recipes' else ''} lists all" if "..." in instead else instead
    )


def _pages(kind: str) -> dict[str, Path]:
    folder = _HERE / kind
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    return {name.removeprefix("published/"): path for name, path in paths.items()}


def tree(kind: str, word: str) -> Tree:
    """The settings written on a page."""
    return parse(*page(kind, word))
