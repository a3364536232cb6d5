"""What to write instead: other people's words, keys that stand elsewhere, and names by any part of them."""

from __future__ import annotations

import pytest

from paceline.errors import SpecError
from paceline.job import read_recipe
from paceline.settings import shipped, suggest
from paceline.settings.addresses import all_addresses

NAMES = ["cifar10/resnet18", "images/resnet18", "imagenet/resnet50-lars", "imagenet/vgg16", "images/resnet50-finetune"]


@pytest.mark.parametrize("word", sorted(word for word in suggest.FOREIGN if "." not in word))
def test_every_word_of_another_program_leads_to_an_address_that_is_there(word: str) -> None:
    (address,) = suggest.elsewhere(word, all_addresses())
    assert address == suggest.FOREIGN[word]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("warmup_epochs=3", "recipe has no 'warmup_epochs'; did you mean 'schedule.warmup'?"),
        ("dropout=0.1", "recipe has no 'dropout'; other kinds have 'model.dropout': alexnet, "),
        ("betas=[0.9, 0.99]", "recipe has no 'betas'; other kinds have 'optimizer.betas': adamw, lamb"),
        ("iterations=100", "recipe has no 'iterations'; write epochs='500 steps' for that many steps"),
        ("data.img_size=64", "did you mean 'data.side'?"),
        ("save_best=true", "did you mean 'on.keep_best'?"),
        ("class_weights=auto", "did you mean 'loss.class_weights'?"),
        ("class_weight=balanced", "did you mean 'loss.class_weights'?"),
        ("sampler=balanced", "an epoch shows each image once; write loss.class_weights=balanced"),
        ("tensorboard=true", "write on.sinks=[console,csv,log,report,tensorboard]"),
        ("patience=3", "did you mean 'stop.patience'?"),
        ("early_stopping=3", "did you mean 'stop.patience'?"),
        ("time_limit=3 hours", "did you mean 'on.time_limit'?"),
        ("resume=runs/a", "write: paceline resume RUN"),
        ("name=mine", "write --out FOLDER"),
        ("data=photos", "images, shapes, synthetic; a folder of images is given by --data FOLDER"),
        ("model=vit_b_16", "`paceline models` lists them, and networks of timm are timm:NAME"),
        ("optimizer=momentum", "did you mean 'sgd' with 'momentum: 0.9'?"),
        ("optimizer.trust=0.1", "did you mean 'optimizer.trust_coefficient'?"),
        ("tail=drop", "did you mean 'drop_last'?"),
        ("average.decay=0.9", "average has no 'decay'; did you mean 'ema.decay'?"),
        ("average.apart=1 epoch", "did you mean 'average.every'?"),
        ("evaluate.mirror=true", "did you mean 'evaluate.flip'?"),
        ("augment.erase.chance=1", "did you mean 'augment.erase.probability'?"),
        ("augment.crop.spread=uniform", "did you mean 'augment.crop.distribution'?"),
        ("augment.crop.object_share=0.1", "did you mean 'augment.crop.object_fraction'?"),
        ("mix.cutmix_chance=0.1", "did you mean 'mix.cutmix_probability'?"),
        ("mix.switch=0.5", "did you mean 'mix.switch_probability'?"),
        ("data.use=0.5", "did you mean 'data.fraction'?"),
        ("loader_threads=3", "did you mean 'on.loader_workers'?"),
        ("resident=true", "did you mean 'on.data_on_device'?"),
        ("zzz=1", "there is about, augment, average, bad_steps_in_a_row, clip, data, drop_last, ema, "),
    ],
)
def test_old_and_foreign_words_are_answered_with_ours(word: str, answer: str) -> None:
    lars = "optimizer={name: lars, lr: 1}"
    with pytest.raises(SpecError) as caught:
        read_recipe("images/resnet18", [lars, word])
    assert answer in str(caught.value)


def test_a_list_of_keys_is_whole() -> None:
    with pytest.raises(SpecError, match=r"there is about, .*, weight_decay$"):
        read_recipe("images/resnet18", ["zzz=1"])


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
    assert suggest.elsewhere(word, all_addresses()) == found


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
    assert said.startswith("; there is graphcore/resnet50, ")
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
    assert suggest.instead_of_value(word, choices) == said
