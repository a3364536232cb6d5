"""Recipes and placements that come with Paceline, found by name."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import SpecError
from paceline.settings.read import Tree, parse
from paceline.settings.suggest import nearest_name

_HERE = Path(__file__).parents[1]


def names(kind: str) -> list[str]:
    """The names of all shipped 'recipes' or 'placements'."""
    folder = _HERE / kind
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def page(kind: str, word: str) -> tuple[str, str]:
    """The text of a shipped page or of a YAML file, and what to call it in messages."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        try:
            return path.read_text(), word
        except (OSError, UnicodeDecodeError) as fault:
            raise SpecError(f"{word}: cannot be read: {getattr(fault, 'strerror', None) or 'it is not text'}") from None
    if word not in names(kind):
        raise SpecError(f"no {kind.removesuffix('s')} is named '{word}'{nearest_name(word, names(kind))}")
    return (_HERE / kind / f"{word}.yaml").read_text(), word


def tree(kind: str, word: str) -> Tree:
    """The settings written on a page."""
    return parse(*page(kind, word))
