"""Finds the training and validation folders of images in folders, under any of their usual names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.index.formats import IMAGE_ENDINGS, SPLIT_WORDS, SplitName, is_folder, visible_entries
from paceline.data.index.image_header import HEIF_ENDINGS, heif_installed

_OTHER_WORDS = {"evaluation": "eval", "dev": "val", "holdout": "val", "testing": "test"}
"""Words that name a split of folders, by the one of SPLIT_WORDS that they stand for."""
_SPLIT_OF: dict[str, SplitName] = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_RANKS = {word: rank for words in SPLIT_WORDS.values() for rank, word in enumerate(words)}
_WORDS = "|".join(sorted([*_SPLIT_OF, *_OTHER_WORDS], key=len, reverse=True))
_AROUND = r"(?:dataset|set|data|images|image|imgs|img|photos|pictures|pics|split|part|folder|seg|[^a-z])*"
_WHOLE = re.compile(rf"{_AROUND}({_WORDS}){_AROUND}")
"""A name that says nothing but the split: 'training_set', 'Test images', 'train2017'."""
_INSIDE = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])")
"""A name that says the split among other things: 'cats-train'."""
_MOST_SPLITS = 4
_DEEPEST = 3
"""How many folders may be wrapped around the splits."""


@dataclass(frozen=True)
class SplitFolders:
    """Where the splits of a data set are, as paths relative to its folder; without a training folder there are none."""

    training: str | None = None
    validation: str | None = None

    def by_split(self) -> list[tuple[SplitName, str]]:
        """The splits that have a folder, training first."""
        both: list[tuple[SplitName, str | None]] = [("training", self.training), ("validation", self.validation)]
        return [(split, name) for split, name in both if name is not None]


def folders_in(folder: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, sorted."""
    # A name that ends like an image is not asked whether it is a folder: there may be a million of them.
    return tuple(
        sorted(entry.name for entry in visible_entries(folder) if not is_image(entry.name) and is_folder(entry))
    )


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's."""
    lower = name.lower()
    return lower.endswith(IMAGE_ENDINGS) or (lower.endswith(HEIF_ENDINGS) and heif_installed())


def split_named(name: str) -> SplitName | None:
    """The split that a word or a folder's name stands for: 'Train', 'training_set', 'test images'."""
    match = _WHOLE.fullmatch(name.lower())
    return _SPLIT_OF[_usual(match[1])] if match else None


def is_plain(name: str) -> bool:
    """Whether a folder's name says only that images are in it: 'images', 'data_set'."""
    return re.fullmatch(_AROUND, name.lower()) is not None


def is_test(name: str) -> bool:
    """Whether the name of a split is that of a test split."""
    match = _WHOLE.fullmatch(name.lower())
    return match is not None and _usual(match[1]) == "test"


def find_splits(folder: Path, subfolders: Sequence[str]) -> SplitFolders:
    """The training and validation folders in a folder, or in the one that is wrapped around them."""
    prefix = ""
    for _ in range(_DEEPEST):
        here = _splits_in(folder / prefix, subfolders)
        if here.training is not None or (here.validation is not None and not prefix):
            return SplitFolders(
                *(name and _innermost(folder, prefix + name) for name in (here.training, here.validation))
            )
        if len(subfolders) != 1 or _holds_images(folder / prefix):
            break
        prefix = f"{prefix}{subfolders[0]}/"
        subfolders = folders_in(folder / prefix)
    return SplitFolders()


def hold_the_same(names: Sequence[Sequence[str]]) -> bool:
    """Whether several folders hold folders of the same names, as the splits of a data set do."""
    return len(names) > 1 and len(names[0]) > 1 and all(set(each) == set(names[0]) for each in names)


def _usual(word: str) -> str:
    return _OTHER_WORDS.get(word, word)


def _splits_in(folder: Path, subfolders: Sequence[str]) -> SplitFolders:
    """The splits among some folders; a 'train' among classes, without folders in it, is a class of trains."""
    words = {name: _usual(match[1]) for name in subfolders if (match := _WHOLE.fullmatch(name.lower()))}
    if not words and len(subfolders) <= _MOST_SPLITS:
        words = {name: _usual(match[1]) for name in subfolders if (match := _INSIDE.search(name.lower()))}
        if len(words) < len(subfolders) or not hold_the_same([folders_in(folder / name) for name in subfolders]):
            words = {}
    # A name that is the word itself comes first; of the words for validation, 'test' comes last.
    ranked = sorted(words, key=lambda name: (name.lower() != words[name], _RANKS[words[name]], name))
    by_split = {split: [name for name in ranked if _SPLIT_OF[words[name]] == split] for split in SPLIT_WORDS}
    training, validation = (next(iter(by_split[split]), None) for split in ("training", "validation"))
    if training is not None and validation is None and len(subfolders) > 1 and not folders_in(folder / training):
        training = None
    if training is None and not (words and all(name.lower() in _RANKS for name in subfolders)):
        validation = None
    return SplitFolders(training, validation)


def _innermost(folder: Path, name: str) -> str:
    """The folder of a split, or the one of the same split that is all it holds, as some archives unpack."""
    subfolders = folders_in(folder / name)
    same = len(subfolders) == 1 and split_named(subfolders[0]) == split_named(name.rpartition("/")[2]) is not None
    return f"{name}/{subfolders[0]}" if same and not _holds_images(folder / name) else name


def _holds_images(folder: Path) -> bool:
    return any(is_image(entry.name) for entry in visible_entries(folder))
