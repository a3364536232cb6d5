"""Reads the words that name a data set, for every `paceline data` command."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DataError
from paceline.files import disk_faults
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.read import override, parse


def read_settings(words: list[str]) -> Files:
    """The settings of a data set from KEY=VALUE words, as a recipe's `data` has them."""
    tree = parse("{name: images}", "data")
    for word in words:
        override(tree, word.removeprefix("data."), Files)
    return build(Files, tree)


def existing_folder(source: Path) -> Path:
    """The folder of a data set; a DataError where there is none."""
    with disk_faults(DataError, source, "cannot be read"):
        there = source.is_dir()
    if not there:
        raise DataError(f"{source}: there is no such folder; write the folder that holds the images")
    return source
