"""What to write instead: other people's words, keys that stand elsewhere, and names by any part of them."""

from __future__ import annotations

import pytest

from paceline.job import addresses
from paceline.settings import shipped, suggest

NAMES = ["cifar10/resnet18", "images/resnet18", "imagenet/resnet50-lars", "imagenet/vgg16", "images/resnet50-finetune"]


@pytest.mark.parametrize("word", sorted(suggest.FOREIGN))
def test_every_word_of_another_program_leads_to_an_address_that_is_there(word: str) -> None:
    (address,) = suggest.elsewhere(word, addresses())
    assert address == suggest.FOREIGN[word]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("lr", ["optimizer.lr"]),
        ("epochs", ["epochs"]),
        ("augment.flip", ["augment.flip"]),
        ("precision", ["on.precision"]),
        ("mixup", ["mix.mixup"]),
        ("name", []),
        ("r", []),
    ],
)
def test_a_word_is_looked_for_as_the_last_part_of_an_address(word: str, found: list[str]) -> None:
    assert suggest.elsewhere(word, addresses()) == found


def test_what_another_program_calls_by_a_word_counts_only_where_it_is_known() -> None:
    assert suggest.elsewhere("batch_size", ["side", "labels"]) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("resnet18", "; there is images/resnet18, cifar10/resnet18"),
        ("imagenet/resnet18", "; there is images/resnet18, cifar10/resnet18"),
        ("resnet50", "; there is images/resnet50-finetune, imagenet/resnet50-lars"),
        ("vgg", "; did you mean 'imagenet/vgg16'?"),
        ("imagenet/vgg17", "; did you mean 'imagenet/vgg16'?"),
        ("imagenet/", "; there is imagenet/vgg16, imagenet/resnet50-lars"),
        ("zzz/", f"; there is {', '.join(sorted(NAMES))}"),
    ],
)
def test_a_name_is_looked_for_by_any_part_of_it(word: str, said: str) -> None:
    assert suggest.nearest_name(word, NAMES) == said


def test_of_many_names_that_fit_the_shortest_are_listed() -> None:
    said = suggest.nearest_name("resnet50", shipped.names("placements"))
    assert said.startswith("; there is resnet50-")
    assert said.count("resnet50") == 6
    assert said.endswith(", ...")


@pytest.mark.parametrize(
    ("word", "choices", "said"),
    [
        ("gpu", ["cpu", "cuda"], "; did you mean 'cuda'?"),
        ("GPU", ["cpu", "cuda"], "; did you mean 'cuda'?"),
        ("gpu", ["gpuu", "pillow"], "; did you mean 'gpuu'?"),
        ("dropp", ["flow", "drop"], "; did you mean 'drop'?"),
        ("zzz", ["flow", "drop"], ""),
    ],
)
def test_a_value_is_suggested_by_meaning_before_spelling(word: str, choices: list[str], said: str) -> None:
    assert suggest.nearest_value(word, choices) == said
