"""A file of YAML becomes text, and text becomes nodes, within bounds: what cannot be settings is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from paceline.errors import SpecError
from paceline.files import read_whole

MOST_BYTES = 4 << 20
MOST_VALUES = 100_000
"""So many values a page may have, those that stand behind an alias counted each time; names of classes are the most."""
DEEPEST = 12
"""So many keys and places in lists may lead to a value."""
_SMALL = 1 << 15
"""Up to this length the parser in Python takes part of a second; it has the better messages."""
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_page(path: Path) -> str:
    """The text of a page; an OSError or a ValueError where it has none."""
    return read_whole(path, MOST_BYTES).decode().replace("\r\n", "\n")


def compose(text: str, name: str) -> yaml.Node | None:
    """The nodes of a YAML text, if it holds any; `name` stands for it in messages."""
    if len(text) <= _SMALL:
        with suppress(yaml.YAMLError):  # which the other parser tells better
            _check_size(text, name)
        return _composed(text, yaml.SafeLoader)
    if len(text) > MOST_BYTES:
        raise SpecError(f"{name}: is larger than {MOST_BYTES >> 20} MiB, so it is no page of settings")
    _check_size(text, name)
    return _composed(text, _FAST)


_composed: Callable[..., yaml.Node | None] = yaml.compose


def too_deep(name: str) -> SpecError:
    """What is said of values inside values inside values."""
    return SpecError(f"{name}: settings nest too deeply; no setting lies more than {DEEPEST} keys deep")


def too_many(name: str) -> SpecError:
    """What is said of a page that nobody wrote."""
    return SpecError(f"{name}: has more than {MOST_VALUES:,} values, so it is no page of settings")


def _check_size(text: str, name: str) -> None:
    """Refuse what would take long to compose; the parsers would even fall over depth."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_FAST):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        if depth > 10 * DEEPEST:
            raise too_deep(name)
        if values > 2 * MOST_VALUES:  # keys are nodes, too
            raise too_many(name)
