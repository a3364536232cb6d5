"""Settings as people write them: every fault is one line that says where, what, and what to write instead."""

from __future__ import annotations

import json
import re

import pytest

from conftest import SMALL, make_recipe
from paceline.errors import SpecError
from paceline.settings import shipped, suggest
from paceline.settings.build import build
from paceline.settings.model import External
from paceline.settings.optimizer import AdamW
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, changes, dump, override, parse
from paceline.settings.recipe import Recipe
from paceline.settings.schedule import Constant, Stepped
from paceline.settings.schema import addresses, fields, kinds
from paceline.settings.types import Settings

SECONDS = "depends on the machine's speed; write epochs, steps, images or %"
LR = "expected a learning rate such as 0.1, '2^-6 per image' or '0.1 per 256 images', found "
AMOUNT = "expected an amount with its unit (epochs, steps, images or %)"
OR_TIME = AMOUNT.replace(" or %", ", % or seconds")
OR_NEVER = AMOUNT.replace("%", "%; or never")


SECTION = "this is a section with keys of its own, found "


def make(text: str, words: tuple[str, ...], model: type[Settings]) -> None:
    """Settings from a page and overrides."""
    tree = parse(text, "test.yaml")
    for word in words:
        override(tree, word, model)
    build(model, tree)


def fault_of(text: str, *words: str, model: type[Settings] = Recipe) -> str:
    """The message for a page and overrides that are wrong."""
    with pytest.raises(SpecError) as caught:
        make(text, words, model)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("report: 1 steps", "epoch: 3", "test.yaml:10: recipe has no 'epoch'; did you mean 'epochs'?"),
        ("schedule: constant", "schedule: {name: constant, warm: 1%}", "test.yaml:8: schedule: constant has no 'warm'"),
        ("resnet8", "resnt8", "test.yaml:2: model: no model is named 'resnt8'; did you mean 'resnet8'?"),
        ("resnet8", "tim:a", "test.yaml:2: model: no model is named 'tim:a'; `paceline models` lists"),
        ("resnet8", "timm", "test.yaml:2: model: timm needs 'network'"),
        (
            "resnet8",
            "{name: timm:a, network: b}",
            "test.yaml:2: model: 'timm:a' names a network already; write ",
        ),
        (
            "resnet8",
            "{name: timm:resnet18, stem: 3x3}",
            "test.yaml:2: model: timm:resnet18 has no 'stem'; there is auxiliary, name, network",
        ),
        ("resnet8", "{name: resnet8, network: resnet18}", "test.yaml:2: model: resnet8 has no 'network'"),
        ("report: 1 steps", "init:\n  from: 3", "test.yaml:11: init.from: expected text, found 3"),
        ("report: 1 steps", "init: {from_: a}", "test.yaml:10: init has no 'from_'; did you mean 'from'?"),
        ("report: 1 steps", "freeze: 3", "test.yaml:10: freeze: expected a list, such as [a, b], found 3"),
        ("report: 1 steps", "freeze: [a, 3]", "test.yaml:10: freeze.1: expected text, found 3"),
        ("report: 1 steps", "lr_factors: 3", "test.yaml:10: lr_factors: expected 'key: value' lines, found 3"),
        (
            "report: 1 steps",
            "lr_factors:\n  head: 2\n  stem: fast",
            "test.yaml:12: lr_factors.stem: expected a number, found 'fast'",
        ),
        ("side: 8", "side: 8, std: [1, 0, 1]", "test.yaml:3: data.std.1: input should be greater than 0, found 0"),
        ("name: sgd", "name: adanw", "test.yaml:7: optimizer: no optimizer is named 'adanw'; did you mean 'adamw'?"),
        ("epochs: 1", "epochs: many", "test.yaml:6: epochs: expected a number, found 'many'"),
        ("global_batch: 16", "global_batch: 16.5", "test.yaml:4: global_batch: expected a whole number, found 16.5"),
        ("global_batch: 16", "global_batch: 0", "test.yaml:4: global_batch: input should be greater than 0, found 0"),
        ("flip: true", "flip: yes", "test.yaml:9: augment.flip: expected true or false, found 'yes'"),
        (
            "augment: {pad: 1, flip: true}",
            "augment: 4",
            "test.yaml:9: augment: this is a section with keys of its own, found 4; write augment.pad=4 ",
        ),
        ("epochs: 1", "epochs: 1\nepochs: 2", "test.yaml:7: 'epochs' is written twice; keep one of them"),
        ("pad: 1", "pad: 1, pad: 2", "test.yaml:9: 'pad' is written twice; keep one of them"),
        ("global_batch: 16\n", "", "test.yaml:2: recipe needs 'global_batch'"),
        (", lr: 0.1", "", "test.yaml:7: optimizer: sgd needs 'lr'"),
        (
            "epochs: 1",
            "drop_last: yes\nepochs: 1",
            "test.yaml:6: drop_last: expected true or false, found 'yes'",
        ),
        ("{name: sgd", "[name: sgd", "test.yaml:7: this is not YAML: "),
        ("epochs: 1", "epochs: 1\n- 3", "test.yaml:7: this is not YAML: "),
        ("lr: 0.1", "lr: fast", f"test.yaml:7: optimizer.lr: {LR}'fast'"),
        ("lr: 0.1", "lr: -0.1", "test.yaml:7: optimizer.lr: expected a learning rate of at least 0, found -0.1"),
        ("report: 1 steps", "report: 5", f"test.yaml:10: report: {OR_TIME}, such as '5 epochs'"),
        ("report: 1 steps", "report: soon", f"test.yaml:10: report: {OR_TIME}"),
        ("report: 1 steps", "report: 0 steps", "test.yaml:10: report: "),
        ("constant", "{name: constant, warmup: 1 hour}", f"test.yaml:8: schedule.warmup: '3600 seconds' {SECONDS}"),
        ("constant", "{name: stepped, drops: [1 minutes]}", f"test.yaml:8: schedule.drops.0: '60 seconds' {SECONDS}"),
        ("report: 1 steps", "evaluate: {every: 2 s}", f"test.yaml:10: evaluate.every: {OR_NEVER}"),
        ("report: 1 steps", "evaluate:\n  every: 2 seconds", f"test.yaml:11: evaluate.every: '2 seconds' {SECONDS}"),
        ("report: 1 steps", "weight_decay: {skip_names: [a, 3]}", "test.yaml:10: weight_decay.skip_names.1: expected"),
        (
            "report: 1 steps",
            "weight_decay: {skip_names: norm}",
            "test.yaml:10: weight_decay.skip_names: expected a lis",
        ),
        ("side: 8", "side: 8, mean: [0, red]", "test.yaml:3: data.mean.1: expected a number, found 'red'"),
        ("side: 8", "side: 8, mean: 0.5", "test.yaml:3: data.mean: expected a list, such as [a, b], found 0.5"),
        ("model: resnet8", "model: null", "test.yaml:2: model: expected a name, such as alexnet or "),
        ("model: resnet8", "? [a]\n: 3", "test.yaml:2: a key must be a plain word"),
        ("epochs: 1", "epochs: 1e999", "test.yaml:6: epochs: "),
    ],
)
def test_a_fault_on_a_page_says_the_line_and_what_to_write(old: str, new: str, start: str) -> None:
    assert old in SMALL
    message = fault_of(SMALL.replace(old, new))
    assert message.startswith(start), message


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("epoch=3", "'epoch=3': recipe has no 'epoch'; did you mean 'epochs'?"),
        ("optimizer.rate=3", "'optimizer.rate=3': optimizer: sgd has no 'rate'; did you mean 'optimizer.lr'?"),
        ("lr=0.1", "'lr=0.1': recipe has no 'lr'; did you mean 'optimizer.lr'?"),
        ("mixup=0.2", "'mixup=0.2': recipe has no 'mixup'; did you mean 'mix.mixup'?"),
        ("momentum=1", "'momentum=1': recipe has no 'momentum'; did you mean 'optimizer.momentum'?"),
        ("augment.mixup=0.2", "'augment.mixup=0.2': augment has no 'mixup'; did you mean 'mix.mixup'?"),
        ("smoothing=0.1", "'smoothing=0.1': recipe has no 'smoothing'; did you mean 'loss.label_smoothing'?"),
        ("batch_size=32", "'batch_size=32': recipe has no 'batch_size'; did you mean 'global_batch'?"),
        ("ema=0.99", f"'ema=0.99': ema: {SECTION}0.99; write ema.decay=0.99"),
        ("optimiser.lr=0.1", "'optimiser.lr=0.1': recipe has no 'optimiser'; did you mean 'optimizer'?"),
        ("a.b.c=1", "'a.b.c=1': recipe has no 'a'; there is about, "),
        ("optimizer..lr=1", "'optimizer..lr=1': expected key=value, such as"),
        (".=1", "'.=1': expected key=value, such as"),
        (
            "data.evaluation.short=8",
            "'data.evaluation.short=8': data: generated has no 'evaluation'; did you mean 'evaluation_side'?",
        ),
        (
            "optimizer=3",
            "'optimizer=3': optimizer: expected a name, such as sgd or rmsprop or lars or larc, found 3",
        ),
        ("weight_decay=1e-4", f"'weight_decay=1e-4': weight_decay: {SECTION}0.0001; write weight_decay.rate=0.0001"),
        ("clip=1", f"'clip=1': clip: {SECTION}1; write clip.value=1 or clip.norm=1 or clip.adaptive=1"),
        ("init=runs/a", f"'init=runs/a': init: {SECTION}'runs/a'; write init.from=runs/a"),
        ("evaluate=never", f"'evaluate=never': evaluate: {SECTION}'never'; write evaluate.every=never"),
        ("evaluate=often", f"'evaluate=often': evaluate: {SECTION}'often'; write evaluate.every=... or evaluate."),
        ("schedule.warmup=5", f"'schedule.warmup=5': schedule.warmup: {AMOUNT}, such as '5 epochs'"),
        ("optimizer.name=sdg", "'optimizer.name=sdg': optimizer: no optimizer is named 'sdg'; there is adamw, "),
        ("optimizer=sdg", "'optimizer=sdg': optimizer: no optimizer is named 'sdg'; there is adamw, "),
        ("optimizer=sgd", "'optimizer=sgd': optimizer: sgd needs 'lr', such as optimizer.lr=\"0.1 per 256 images\""),
        (
            "optimizer={name: lars, lr: 1, skip_names: head}",
            "'optimizer={name: lars, lr: 1, skip_names: head}': optimizer.skip_names: expected a list, such as [a, b], "
            "found 'head'; to add it write [norm,bias,head]",
        ),
        ("optimizer=adamw", "'optimizer=adamw': optimizer: adamw needs 'lr', such as optimizer.lr=0.0003"),
        ("mix.cutmix=fixed", "'mix.cutmix=fixed': mix.cutmix: fixed needs 'kept', such as mix.cutmix.kept=0.5"),
        ("data=cifar", "'data=cifar': data: no data is named 'cifar'; did you mean 'cifar10'?"),
        (
            "schedule=stepped",
            "'schedule=stepped': schedule: stepped needs 'drops', such as schedule.drops=\"[50%, 75%]\"",
        ),
        ("epochs=many", "'epochs=many': epochs: expected a number, found 'many'"),
        ("epochs=[", "'epochs=[': epochs: expected a number, found '['"),
        ("seed=1.5", "'seed=1.5': seed: expected a whole number, found 1.5"),
        ("about=", "'about=': about: expected text, found null"),
        ("drop_last=drop", "'drop_last=drop': drop_last: expected true or false, found 'drop'"),
        (
            "init.conv=he",
            "'init.conv=he': init.conv: expected published or he-fan-out or he-fan-in or he-mixed or truncated-fan-in "
            "or glorot-uniform or uniform-fan-in or normal-0.1 or normal-0.01, found 'he'",
        ),
        ("init.from=3", "'init.from=3': init.from: expected text, found 3"),
        ("init.form=a", "'init.form=a': init has no 'form'; did you mean 'from'?"),
        ("init.from_=a", "'init.from_=a': init has no 'from_'; did you mean 'from'?"),
        ("model=timm", "'model=timm': model: timm needs 'network'"),
        ("model=tim:a", "'model=tim:a': model: no model is named 'tim:a'; `paceline models` lists"),
        ("model=resnet8:a", "'model=resnet8:a': model: no model is named 'resnet8:a'; did you mean 'resnet8'?"),
        ("model.name=tim:b", "'model.name=tim:b': model: no model is named 'tim:b'; `paceline models` lists"),
        (
            "lr_factors.head=-1",
            "'lr_factors.head=-1': lr_factors.head: input should be greater than or equal to 0, found -1",
        ),
        ("lr_factors=", "'lr_factors=': lr_factors: expected 'key: value' lines, found null"),
        ("epochs.x=3", "'epochs.x=3': 'epochs' is a single value and has no keys of its own"),
        ("epochs", "'epochs': expected key=value, such as epochs=20 or optimizer.lr=0.2"),
        ("=3", "'=3': expected key=value, such as epochs=20 or optimizer.lr=0.2"),
        (
            "stage1]",
            "'stage1]': expected key=value, such as epochs=20 or optimizer.lr=0.2; a word with spaces in it needs",
        ),
        ("report=5", f"'report=5': report: {OR_TIME}, such as '5 epochs'"),
        ("report=0.25", f"'report=0.25': report: {OR_TIME}, such as '0.25 epochs'"),
        ("evaluate.every=none", f"'evaluate.every=none': evaluate.every: {OR_NEVER}"),
        (
            "evaluate.limit=1 epoch",
            "'evaluate.limit=1 epoch': evaluate.limit: '1 epoch' is no number of images; write ",
        ),
        ("epochs=5 stps", "'epochs=5 stps': epochs: expected an amount with its unit (epochs, steps or images)"),
        ("epochs=10%", "'epochs=10%': epochs: '10%' would be a part of the run's own length; write epochs, steps or "),
        ("epochs=2 hours", "'epochs=2 hours': epochs: '7200 seconds' depends on the machine's speed; write epochs, "),
        ("epochs=0 steps", "'epochs=0 steps': epochs: must be greater than zero, such as '1 step'"),
        ("evaluate.every=0 epochs", "'evaluate.every=0 epochs': evaluate.every: "),
        ("optimizer.lr=fast", f"'optimizer.lr=fast': optimizer.lr: {LR}'fast'"),
        ("optimizer.lr=0.1.2 per image", f"'optimizer.lr=0.1.2 per image': optimizer.lr: {LR}"),
        (
            "loss.label_smoothing=1",
            "'loss.label_smoothing=1': loss.label_smoothing: input should be less than 1, found",
        ),
    ],
)
def test_a_fault_in_an_override_quotes_it(word: str, start: str) -> None:
    message = fault_of(SMALL, word)
    assert message.startswith(start), message


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("replica=3", "'replica=3': placement has no 'replica'; did you mean 'replicas'?"),
        ("device=gpu", "'device=gpu': device: expected auto or cpu or cuda or mps, found 'gpu'; did you mean 'cuda'?"),
        ("save=5", "'save=5': save: expected an amount with its unit (epochs, steps, images, % or seconds), such as"),
        ("replicas=many", "'replicas=many': replicas: expected "),
        ("replicas=0", "'replicas=0': replicas: "),
        ("micro_batch=1.5", "'micro_batch=1.5': micro_batch: expected "),
        ("precision=8.8", "'precision=8.8': precision: expected "),
        ("data_on_device=maybe", "'data_on_device=maybe': data_on_device: expected "),
        ("save=0 epochs", "'save=0 epochs': save: "),
        ("keep_every=0 hours", "'keep_every=0 hours': keep_every: "),
        ("save_offset=5 seconds", f"'save_offset=5 seconds': save_offset: '5 seconds' {SECONDS}"),
        ("timeout=0", "'timeout=0': timeout: input should be greater than 0, found 0"),
        ("recompute=3", "'recompute=3': recompute: expected a list, such as [a, b], found 3"),
        ("recompute=[stem, 3]", "'recompute=[stem, 3]': recompute.1: expected text, found 3"),
    ],
)
def test_a_fault_in_a_placement_quotes_the_override(word: str, start: str) -> None:
    message = fault_of("", word, model=Placement)
    assert message.startswith(start), message
    assert "more)" not in message  # one wrong value is one fault


@pytest.mark.parametrize(
    "word",
    [
        "epochs=1_",
        "epochs=1_.5",
        "report=1/0 epochs",
        "report=1.5/2 epochs",
        "optimizer.lr=2^2000 per image",
        "optimizer.lr=0.1 per 0 images",
        "schedule={name: exponential, every: 0 epochs}",
    ],
)
def test_impossible_numbers_are_faults_of_the_settings_not_of_the_program(word: str) -> None:
    message = fault_of(SMALL, word)
    assert message.startswith(f"'{word}': "), message


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("precision=bfloat16", "'bf16'?"),
        ("precision=16.32", "'bf16'?"),
        ("precision=16.16", "'bf16' with 'on.weights=bf16'?"),
        ("precision=fp16.16", "'fp16' with 'on.weights=fp16'?"),
        ("precision=half", "'fp16'?"),
        ("precision=32", "'fp32'?"),
        ("precision=64.64", "'fp64'?"),
    ],
)
def test_a_precision_that_others_name_is_told_ours(word: str, end: str) -> None:
    assert fault_of("", word, model=Placement).endswith(f"; did you mean {end}")


@pytest.mark.parametrize("digits", [4300, 4301, 5000])
@pytest.mark.parametrize("key", ["global_batch", "epochs", "report", "drop_last"])
def test_a_number_of_very_many_digits_is_one_short_line(key: str, digits: int) -> None:
    nines = "9" * digits
    for message in (fault_of(SMALL, f"{key}={nines}x"), fault_of(SMALL.replace("model: resnet8", f"model: {nines}"))):
        assert len(message) < 1000
    if digits > 4300:
        assert (
            fault_of(SMALL, f"seed={nines}").partition(": ")[2].startswith("seed: expected a whole number, found '99")
        )


def test_a_section_for_another_file_is_sent_there() -> None:
    tree = parse(SMALL + "on: {precision: bf16}\n", "test.yaml")
    with pytest.raises(SpecError) as caught:
        build(Recipe, tree, ["on.precision"])
    assert str(caught.value) == (
        "test.yaml:11: recipe has no 'on'; put its keys into a file given with --on FILE, or write on.KEY=VALUE"
    )


def test_a_key_of_another_kind_is_not_looked_for_elsewhere() -> None:
    message = fault_of(SMALL, "optimizer={name: sgd, lr: 1, betas: [0.9, 0.99]}")
    assert message.endswith("optimizer: sgd has no 'betas'; there is lr, momentum, name, nesterov")


def test_a_prefix_is_no_part_of_the_key_and_stays_in_the_message() -> None:
    tree = Tree()
    override(tree, "on.replicas=2", Placement, prefix="on.")
    assert tree.values == {"replicas": 2}
    assert tree.place(("replicas",)) == "'on.replicas=2'"


def test_the_addresses_of_a_recipe_are_those_of_the_kinds_it_names() -> None:
    every, named = addresses(Recipe), addresses(Recipe, {"optimizer": {"name": "sgd"}})
    assert {"epochs", "optimizer", "optimizer.lr", "optimizer.trust_coefficient", "data.evaluation.short"} <= set(every)
    assert "optimizer.lr" in named
    assert "optimizer.trust_coefficient" not in named
    assert len(set(every)) == len(every)


def test_text_with_forbidden_characters_is_not_yaml() -> None:
    assert fault_of("about: a\x07b\n").startswith("test.yaml:1: this is not YAML")


def test_a_page_that_lacks_keys_is_told_all_of_them() -> None:
    assert fault_of("") == "test.yaml: recipe needs 'model', 'global_batch', 'epochs', 'optimizer', 'schedule'"
    assert fault_of(SMALL.replace("{name: sgd, lr: 0.1, momentum: 0.9}", "sgd").replace("epochs: 1\n", "")) == (
        "test.yaml:2: recipe needs 'epochs' (and 1 more)"
    )
    assert fault_of(SMALL, "optimizer={name: adamw, lr: 1, betas: []}").endswith("values in this list (and 1 more)")


def test_a_page_that_is_a_list_is_refused() -> None:
    assert fault_of("- a\n- b") == """test.yaml:1: expected 'key: value' lines, found ["a", "b"]"""


def test_settings_that_nest_without_end_are_refused() -> None:
    assert fault_of("a: &a {b: *a}").startswith("test.yaml: settings nest too deeply at a.b.b")


def test_only_true_false_null_and_numbers_are_more_than_text() -> None:
    tree = parse(
        "a: yes\nb: on\nc: 0x10\nd: 2024-01-01\ne: 1_000\nf: 1e3\ng: .5\nh: ~\ni: true\nj: '3'\nk: 12:30:00\nl: -4\nm:",
        "t",
    )
    assert tree.values == {
        "a": "yes", "b": "on", "c": "0x10", "d": "2024-01-01", "e": 1000, "f": 1000.0, "g": 0.5, "h": None, "i": True,
        "j": "3", "k": "12:30:00", "l": -4, "m": None,
    }  # fmt: skip
    assert isinstance(tree.values["e"], int)
    assert isinstance(tree.values["f"], float)


def test_the_place_of_a_value_is_its_line_or_that_of_what_holds_it() -> None:
    tree = parse("a: 1\nb:\n  c: 2\n  d: [3,\n    4]\n", "page.yaml")
    assert tree.place(("a",)) == "page.yaml:1"
    assert tree.place(("b", "c")) == "page.yaml:3"
    assert tree.place(("b", "d", 1)) == "page.yaml:5"
    assert tree.place(("b", "missing", "deeper")) == "page.yaml:2"
    assert tree.place(("missing",)) == "page.yaml:1"
    override(tree, "e.f.g=1", Recipe)
    assert tree.place(("e",)) == tree.place(("e", "f")) == "'e.f.g=1'"
    assert Tree().place(("missing",)) == "settings"


def test_a_kind_may_be_given_by_its_name_alone() -> None:
    assert make_recipe("schedule=constant").schedule == Constant(name="constant")
    assert make_recipe("optimizer={name: sgd, lr: 0.5}").optimizer.lr.at(16) == 0.5


def test_choosing_another_kind_drops_what_the_page_said_of_the_old_one() -> None:
    page = SMALL.replace("lr: 0.1", "lr: 0.1, nesterov: true")
    chosen = make_recipe("optimizer.name=adamw", text=page).optimizer
    assert isinstance(chosen, AdamW)
    assert chosen.lr.at(16) == 0.1  # a key that both kinds know stays
    again = make_recipe("optimizer.name=sgd", text=page).optimizer
    assert again.model_dump()["nesterov"] is True


def test_choosing_another_kind_keeps_and_checks_what_an_override_said() -> None:
    page = SMALL.replace("lr: 0.1", "lr: 0.1, nesterov: true")
    message = fault_of(page, "optimizer.momentum=0.5", "optimizer.name=adamw")
    assert message.startswith("'optimizer.momentum=0.5': optimizer: adamw has no 'momentum'"), message
    message = fault_of(page, "optimizer.name=adamw", "optimizer.momentum=0.5")
    assert message.startswith("'optimizer.momentum=0.5': optimizer: adamw has no 'momentum'"), message
    chosen = make_recipe("schedule.drops=[50%]", "schedule.name=stepped").schedule
    assert isinstance(chosen, Stepped)


def test_choosing_an_unknown_kind_keeps_what_an_override_said() -> None:
    tree = parse(SMALL, "test.yaml")
    override(tree, "optimizer.lr=0.2", Recipe)
    override(tree, "optimizer.name=adam", Recipe)
    assert tree.values["optimizer"] == {"name": "adam", "lr": 0.2}


def test_an_override_reaches_into_a_kind_given_by_name_and_into_sections_not_written() -> None:
    recipe = make_recipe("schedule.warmup=2 steps", "loss.label_smoothing=0.1", "model.shortcut=projection")
    assert str(recipe.schedule.warmup) == "2 steps"
    assert recipe.loss.label_smoothing == 0.1
    assert recipe.model.model_dump() == {"name": "resnet8", "shortcut": "projection"}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("timm:a.b_1", ()),
        ("'timm:a.b_1'", ()),
        ("{name: timm:a.b_1}", ()),
        ("{name: timm, network: a.b_1}", ()),
        ("resnet8", ("model=timm:a.b_1",)),
        ("resnet8", ("model.name=timm:a.b_1",)),
        ("{name: resnet8, shortcut: pad}", ("model.name=timm:a.b_1",)),
        ("{name: timm, network: c}", ("model.name=timm:a.b_1",)),
        ("{name: torchvision, network: c}", ("model.name=timm:a.b_1",)),
        ("timm:c", ("model={name: timm:a.b_1}",)),
    ],
)
def test_a_network_of_another_package_is_one_word_or_two_keys(page: str, words: tuple[str, ...]) -> None:
    recipe = make_recipe(*words, text=SMALL.replace("resnet8", page))
    assert recipe.model == External(name="timm", network="a.b_1")


def test_only_the_first_colon_parts_package_and_network() -> None:
    assert make_recipe("model=timm:hf-hub:a/b").model == External(name="timm", network="hf-hub:a/b")


def test_a_network_of_another_package_has_settings_of_its_own() -> None:
    expected = External(name="torchvision", network="googlenet", auxiliary=0.5)
    assert make_recipe("model={name: torchvision:googlenet, auxiliary: 0.5}").model == expected
    assert make_recipe("model=torchvision:googlenet", "model.auxiliary=0.5").model == expected
    page = SMALL.replace("resnet8", "{name: torchvision:googlenet, auxiliary: 0.5}")
    assert make_recipe("model.name=resnet20", text=page).model == make_recipe("model=resnet20").model


def test_no_text_but_a_package_s_name_is_cut_at_a_colon() -> None:
    recipe = make_recipe("about=timm:a", "init.from=timm:a")
    assert (recipe.about, recipe.init.from_) == ("timm:a", "timm:a")


@pytest.mark.parametrize(
    ("page", "words", "place"),
    [
        ("timm:a", (), "test.yaml:2"),
        ("\n  name: timm:a", (), "test.yaml:3"),
        ("\n  name: timm\n  network: a", (), "test.yaml:4"),
        ("resnet8", ("model=timm:a",), "'model=timm:a'"),
        ("resnet8", ("model.name=timm:a",), "'model.name=timm:a'"),
        ("{name: timm, network: b}", ("model.name=timm:a",), "'model.name=timm:a'"),
        ("{name: timm, network: b}", ("model.network=a",), "'model.network=a'"),
    ],
)
def test_a_dump_says_where_another_package_s_network_came_from(page: str, words: tuple[str, ...], place: str) -> None:
    tree = parse(SMALL.replace("resnet8", page), "test.yaml")
    for word in words:
        override(tree, word, Recipe)
    dumped = dump(build(Recipe, tree), tree)
    (line,) = [line for line in dumped.splitlines() if line.startswith("  network: a ")]
    assert line.partition("# ")[2] == place


@pytest.mark.parametrize(
    "source", ["runs/a", "weights/b.pth", "timm:resnet18", "1e5", "null", "a: b", "~/c d.safetensors"]
)
def test_weights_from_elsewhere_are_written_with_the_key_from(source: str) -> None:
    quoted = json.dumps(source)
    recipe = make_recipe(text=SMALL + f"init: {{from: {quoted}}}\n")
    assert recipe.init.from_ == source
    assert make_recipe(f"init.from={quoted}") == recipe
    dumped = dump(recipe)
    assert "\n  from: " in dumped
    assert "from_" not in dumped
    assert build(Recipe, parse(dumped, "dump")) == recipe
    assert changes(make_recipe(), recipe) == [f"init.from: null -> '{source}'"]


def test_a_dump_says_where_from_came_from() -> None:
    tree = parse(SMALL + "init: {from: runs/a}\n", "test.yaml")
    dumped = dump(build(Recipe, tree), tree)
    assert re.search(r"^  from: runs/a +# test.yaml:11$", dumped, re.MULTILINE)
    assert re.search(r"^  from: null +# default$", dump(make_recipe(), Tree()), re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("lr_factors={}",),
        ("lr_factors={head: 10, stage1: 0.1}",),
        ("lr_factors.head=10", "lr_factors.stage1=0.1"),
        ("freeze=[]",),
        ("freeze=[stem, stage1/unit1]",),
        ("model=timm:a",),
        ("model=torchvision:a", "model.auxiliary=0"),
        ("init.from=runs/a", "freeze=[stage1]", "lr_factors.stage1/unit1=0"),
        ("model=inception-resnet-v2", "model.units=[5, 10, 5]"),
        ("model=efficientnet-b0", "model.width=0.5"),
        ("norm={name: group, proxy: true}",),
        ("norm.momentum=0.01",),
    ],
)
def test_a_dump_reads_back_as_the_same_recipe(words: tuple[str, ...]) -> None:
    recipe = make_recipe(*words)
    for places in (None, Tree()):
        assert build(Recipe, parse(dump(recipe, places), "dump")) == recipe


def test_an_empty_section_is_written_as_one() -> None:
    assert "\nlr_factors: {}\n" in dump(make_recipe())
    assert make_recipe(text=SMALL + "lr_factors: {}\n") == make_recipe()


def test_factors_of_blocks_are_compared_one_by_one() -> None:
    one, other = make_recipe(), make_recipe("lr_factors={head: 10, stage1: 0.1}")
    assert set(changes(one, other)) == {"lr_factors.head: null -> 10.0", "lr_factors.stage1: null -> 0.1"}
    third = make_recipe("lr_factors={head: 10, stage1: 0.2}")
    assert changes(other, third) == ["lr_factors.stage1: 0.1 -> 0.2"]


@pytest.mark.parametrize(
    ("word", "blocks"),
    [("recompute=all", ("all",)), ("recompute=[stage1, head]", ("stage1", "head")), ("recompute=[]", ())],
)
def test_blocks_to_compute_again_are_a_name_or_a_list(word: str, blocks: tuple[str, ...]) -> None:
    tree = Tree()
    override(tree, word, Placement)
    placed = build(Placement, tree)
    assert placed.recompute == blocks
    assert build(Placement, parse(dump(placed), "dump")) == placed


def test_a_later_override_wins() -> None:
    assert make_recipe("epochs=3", "epochs=4").epochs == 4


@pytest.mark.parametrize(
    "about", ["1e5", "08", "1_000", "true", "~", "a # b", "a\nb", "- a", "'", "\\", "😀", " x ", ""]
)
def test_any_text_survives_being_written_and_read(about: str) -> None:
    recipe = make_recipe().model_copy(update={"about": about})
    for places in (None, Tree()):
        page = "recipe:\n" + dump(recipe, places, "  ")
        assert parse(page, "dump").values["recipe"]["about"] == about


def test_a_dump_says_where_each_value_came_from() -> None:
    tree = parse("model: resnet8\noptimizer:\n  name: sgd\n  lr: 0.1\n" + "global_batch: 8\nepochs: 1\n", "p.yaml")
    override(tree, "schedule=constant", Recipe)
    override(tree, "augment.pad=2", Recipe)
    dumped = dump(build(Recipe, tree), tree)
    places = {line.partition(":")[0]: line.partition("# ")[2] for line in dumped.splitlines() if "# " in line}
    assert places["  lr"] == "p.yaml:4"
    assert places["global_batch"] == "p.yaml:5"
    assert places["  pad"] == "'augment.pad=2'"
    assert places["  flip"] == "default"
    assert places["seed"] == "default"
    names = [line.partition("# ")[2] for line in dumped.splitlines() if line.startswith("  name:")]
    assert names == ["p.yaml:1", "default", "p.yaml:3", "'schedule=constant'"]  # model, norm, optimizer, schedule


def test_a_dump_does_not_trace_a_default_to_a_line_that_an_override_replaced() -> None:
    tree = parse(SMALL.replace("constant", "{name: cosine, warmup: 3 steps}"), "p.yaml")
    override(tree, "schedule=constant", Recipe)
    dumped = dump(build(Recipe, tree), tree)
    warmup = next(line for line in dumped.splitlines() if line.startswith("  warmup: 0 steps"))
    assert warmup.partition("# ")[2] in ("default", "'schedule=constant'")


def test_differences_name_the_key_and_both_values() -> None:
    one, other = make_recipe(), make_recipe("epochs=3", "augment.flip=false", "about=new")
    assert changes(one, one) == []
    assert set(changes(one, other)) == {
        "epochs: 1.0 -> 3.0",
        "augment.flip: true -> false",
        "about: '' -> 'new'",
    }


def test_differences_between_kinds_name_the_keys_of_both() -> None:
    one, other = make_recipe(), make_recipe("optimizer.name=rmsprop")
    assert set(changes(one, other)) == {
        "optimizer.name: 'sgd' -> 'rmsprop'",
        "optimizer.nesterov: false -> null",
        "optimizer.form: null -> 'tensorflow'",
        "optimizer.decay: null -> 0.9",
        "optimizer.epsilon: null -> 0.001",
    }


@pytest.mark.parametrize(
    ("word", "choices", "said"),
    [
        ("epoch", ["epochs", "seed"], "; did you mean 'epochs'?"),
        ("zzz", ["b", "a"], "; there is a, b"),
        ("zzz", [f"{i:02}" for i in range(13)], "; there is 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11, 12"),
        ("zzz", [], ""),
    ],
)
def test_the_nearest_choice_is_suggested_or_all_are_listed(word: str, choices: list[str], said: str) -> None:
    assert suggest.nearest_kind(word, choices) == said


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_recipe().epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", shipped.names("recipes"))
def test_every_shipped_recipe_is_valid_and_says_what_it_is_about(name: str) -> None:
    recipe = build(Recipe, shipped.tree("recipes", name))
    assert recipe.about


def test_a_shipped_page_that_is_not_there_is_suggested_a_near_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(SpecError) as caught:
        shipped.tree("recipes", "cifar10/resnet2")
    assert str(caught.value) == "no recipe is named 'cifar10/resnet2'; did you mean 'cifar10/resnet20'?"
    missing = tmp_path_factory.mktemp("pages") / "mine.yaml"
    with pytest.raises(SpecError) as caught:
        shipped.tree("recipes", str(missing))
    assert str(caught.value) == f"{missing}: cannot be read: No such file or directory"
    missing.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError) as caught:
        shipped.tree("recipes", str(missing))
    assert str(caught.value) == f"{missing}: cannot be read: it is not text"


def test_a_page_of_ones_own_is_read_by_its_path(tmp_path_factory: pytest.TempPathFactory) -> None:
    page = tmp_path_factory.mktemp("pages") / "mine.yaml"
    page.write_text(SMALL)
    tree = shipped.tree("recipes", str(page))
    assert build(Recipe, tree) == make_recipe()
    assert tree.place(("epochs",)) == f"{page}:6"


def test_every_key_that_a_kind_needs_has_an_example_that_it_takes() -> None:
    needed = {
        (section, name, key): info
        for section, field in fields(Recipe).items()
        for name, kind in kinds(field).items()
        for key, info in fields(kind).items()
        if info.is_required() and key != "name"
    }
    assert len(needed) > 8
    for (section, name, key), info in needed.items():
        assert info.examples, f"{section}.{key} of {name}"
        kind = kinds(fields(Recipe)[section])[name]
        kind.model_validate_json(json.dumps({"name": name, key: info.examples[0]}))
