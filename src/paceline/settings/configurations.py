"""What older systems called a recipe on a placement, so that their names are found here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from paceline.settings.recipe import Recipe
from paceline.settings.schema import fields, kinds

_TABLE = Path(__file__).with_suffix(".yaml")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes most of a tenth of a second
_CUTOFF = 0.8
_MOST = 3


@dataclass(frozen=True)
class Configuration:
    """A recipe and a placement that an older system ran together."""

    recipe: str
    placement: str
    hosts: int
    """Machines it ran on there."""
    devices: int
    """IPUs, cards or GPUs, the stages of a pipeline counted each."""
    name: str = ""
    """What it was called there; empty where it had no name."""
    release: str = ""
    """The release in which the name stood for this, where it stood for something else in another."""
    batch: int | None = None
    """For a configuration of inference, its batch."""

    def __str__(self) -> str:
        release = f" (release {self.release})" if self.release else ""
        return f"{self.recipe} --on {self.placement}{release}"


@cache
def configurations() -> tuple[Configuration, ...]:
    """Every recipe with every placement that it was published with."""
    return tuple(Configuration(**row) for row in yaml.load(_TABLE.read_text(), _LOADER))


def named(word: str) -> list[Configuration]:
    """What an older name stands for, its other releases last; underscores and hyphens are one, and mk2 may be left out.

    A name that is a network's as well stands for the network: nobody who writes resnet50 means sixteen devices.
    """
    for text in (_plain(word), f"mk2-{_plain(word)}"):
        if alike := [each for each in _findable() if _plain(each.name) == text]:
            return alike
    return []


@cache
def _findable() -> list[Configuration]:
    networks = kinds(fields(Recipe)["model"])
    return [each for each in configurations() if each.name and each.name not in networks]


def near(word: str) -> list[Configuration]:
    """Those with the names nearest to a word that is none."""
    known = {_plain(each.name): each for each in reversed(_findable())}
    text = _plain(word)
    inside = [name for name in reversed(known) if len(text) > _MOST and text in name]
    return [known[name] for name in inside[:_MOST] or difflib.get_close_matches(text, known, _MOST, _CUTOFF)]


def stands_for(word: str) -> list[str]:
    """What to say of a word that is an older name: what it stands for, and what else it once stood for."""
    found = named(word)
    if not found:
        return []
    first, *others = found
    also = f"; also {' and '.join(map(str, others))}" if others else ""
    batch = f"; it is for inference at a batch of {first.batch}: paceline bench infer {word}" if first.batch else ""
    return [f"{word} is {first}{also}{batch}"]


def placement_of(word: str) -> str | None:
    """The placement that an older name brings along."""
    found = named(word)
    return found[0].placement if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
