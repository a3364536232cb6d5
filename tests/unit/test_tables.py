"""The model tables against networks that are really built: sizes, memory, blocks, and how small images may be."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch

from conftest import make_recipe
from paceline.facts import DataFacts
from paceline.model import tables
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.cost import block_costs, count_parameters
from paceline.model.dropout import DropoutMasks
from paceline.model.norm import BatchNormAct, NormAct
from paceline.settings.model import External, Model
from paceline.settings.recipe import Recipe

SETTINGS = {
    "vgg11-bn": ("{name: vgg11-bn, head: mean}", 32),
    "googlenet": ("{name: googlenet, auxiliary: 0}", 15),
    "inception-v3": ("{name: inception-v3, auxiliary: 0}", 75),
    "inception-resnet-v2": ("{name: inception-resnet-v2, units: [5, 10, 5]}", 75),
    "efficientnet-b0": ("{name: efficientnet-b0, width: 0.5, depth: 1.3}", 1),
    "resnet50": ("{name: resnet50, stem: 3x3}", 1),
    "resnext14": ("{name: resnext14, stem: 3x3}", 1),
    "mobilenet-v2": ("{name: mobilenet-v2, width: 0.35}", 1),
}
"""Settings that change blocks or smallest sides, and the smallest side with them."""


LARGE = (
    "inception-v3",
    "inception-v4",
    "inception-resnet-v2",
    "efficientnet-b4",
    "efficientnet-b5",
    "efficientnet-b6",
    "efficientnet-b7",
)
MEMBERS = [
    pytest.param(member, id=member.name, marks=[pytest.mark.long] if member.name in LARGE else [])
    for member in tables.MEMBERS
]
"""Every network; the largest take too long for `make test`."""


def facts_of(member: tables.Member, side: int) -> DataFacts:
    return DataFacts(1, 1, member.classes, side)


FAMILIES = [
    typing.get_args(family.model_fields["name"].annotation)
    for family in typing.get_args(Model)
    if family is not External
]
"""The names of every network that the settings know by family, but for other packages' ones."""
NAMES = [name for names in FAMILIES for name in names]


@pytest.mark.parametrize("member", MEMBERS)
def test_the_tables_say_what_is_built(member: tables.Member) -> None:
    recipe = make_recipe(f"model={member.name}")
    rows = block_costs(recipe, facts_of(member, member.side))
    assert sum(row.parameters for row in rows) == member.parameters
    assert sum(row.activation_bytes for row in rows) == 4 * member.activations
    fewer = dataclasses.replace(facts_of(member, member.side), classes=7)
    assert count_parameters(recipe, fewer) == tables.parameters(recipe.model, fewer)
    assert tuple(row.name for row in rows) == tables.block_names(recipe.model)
    facts = tables.network_facts(recipe.model, facts_of(member, member.side))
    assert (facts.parameters, facts.activations) == (member.parameters, member.activations)
    assert (facts.blocks, facts.smallest_side) == (tables.block_names(recipe.model), member.smallest_side)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet50", ["model.version=v1", "model.blur=true"]),
        ("efficientnet-b0", ["model.dropout=0.4", "model.survival=1", "model.activation=relu", "model.padding=same"]),
        ("googlenet", ["model.auxiliary_dropout=0", "model.dropout=0"]),
        ("inception-resnet-v2", ["model.residual_scale=[0.2, 0.2, 0.2]"]),
    ],
)
def test_settings_without_weights_do_not_change_the_count(name: str, words: list[str]) -> None:
    recipe = make_recipe(f"model={name}", *words)
    facts = facts_of(tables.member(name), tables.member(name).side)
    assert tables.parameters(recipe.model, facts) == tables.member(name).parameters
    assert count_parameters(recipe, facts) == tables.member(name).parameters


@pytest.mark.parametrize(
    "word", ["model.group_dim=16", "model.expand_ratio=4", "model.width=2", "model.squeeze_excite=0"]
)
def test_a_changed_network_is_not_in_the_tables(word: str) -> None:
    recipe = make_recipe("model=efficientnet-b0", word)
    assert tables.parameters(recipe.model, facts_of(tables.member("efficientnet-b0"), 224)) is None


def assert_smallest(recipe: Recipe, facts: DataFacts) -> None:
    """Images of this side go through in training, and those of one pixel less do not."""
    rows = block_costs(recipe, facts)
    assert len(rows) == len(tables.block_names(recipe.model))
    if facts.side > 1:
        with pytest.raises(RuntimeError, match=r"too small|greater than actual input size"):
            block_costs(recipe, DataFacts(1, 1, facts.classes, facts.side - 1))


@pytest.mark.parametrize("member", MEMBERS)
def test_no_smaller_image_than_the_smallest_goes_through(member: tables.Member) -> None:
    assert_smallest(make_recipe(f"model={member.name}"), facts_of(member, member.smallest_side))


@pytest.mark.parametrize(
    ("settings", "smallest"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.long] if name.startswith("inception") else [])
        for name, case in SETTINGS.items()
    ],
)
def test_settings_change_blocks_and_smallest_side_in_the_tables_too(settings: str, smallest: int) -> None:
    recipe = make_recipe(f"model={settings}")
    assert tables.smallest_side(recipe.model) == smallest
    assert_smallest(recipe, DataFacts(1, 1, 10, smallest))
    facts = DataFacts(1, 1, 10, max(smallest, 32))
    assert tuple(row.name for row in block_costs(recipe, facts)) == tables.block_names(recipe.model)


def test_every_network_has_a_row_in_the_tables() -> None:
    assert sorted(member.name for member in tables.MEMBERS) == sorted(NAMES)
    assert [tables.member(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize(("side", "times"), [(112, 0.25), (224, 1), (448, 4)])
def test_activations_grow_with_the_area_of_a_picture(side: int, times: float) -> None:
    facts = tables.network_facts(make_recipe("model=resnet50").model, DataFacts(1, 1, 1000, side))
    assert facts.activations == times * tables.member("resnet50").activations
    assert facts.parameters == 25_557_032


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50"])
def test_the_memory_of_a_3x3_stem_is_near_what_is_built(name: str) -> None:
    recipe = make_recipe(f"model={{name: {name}, stem: 3x3}}")
    built = sum(row.activation_bytes for row in block_costs(recipe, DataFacts(1, 1, 10, 32))) / 4
    assert built <= tables.network_facts(recipe.model, DataFacts(1, 1, 10, 32)).activations <= 2 * built


def sides_of_norms(recipe: Recipe, sides: set[int]) -> dict[int, int]:
    """The fewest pixels a side that any norm sees, by the side of the images."""
    with torch.device("meta"):
        built = build_network(recipe, DataFacts(1, 1, 10, 32))
        batch = Batch(torch.empty(1, 0), *DropoutMasks(built, 0, torch.float32)(torch.arange(2)))
    seen: list[int] = []
    for part in built.modules():
        if isinstance(part, NormAct):
            part.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[2]))
    found = {}
    for side in sides:
        seen.clear()
        built(torch.empty(2, 3, side, side, device="meta"), batch=batch)
        found[side] = min(seen)
    return found


@pytest.mark.parametrize(
    "settings", [*(names[-1] for names in FAMILIES[1:]), *(settings for settings, _ in SETTINGS.values())]
)
def test_a_plan_knows_how_many_pixels_the_norms_see(settings: str) -> None:
    recipe = make_recipe(f"model={settings}", "norm=none")
    smallest = tables.smallest_side(recipe.model)
    sides = {smallest, smallest + 1, *(side for side in (32, 33, 107, 224, 347) if side >= smallest)}
    for side, fewest in sides_of_norms(recipe, sides).items():
        assert tables.network_facts(recipe.model, DataFacts(1, 1, 10, side)).last_side == fewest, side


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_knows_whether_a_network_has_norms(name: str) -> None:
    recipe = make_recipe(f"model={name}")
    with torch.device("meta"):
        built = build_network(recipe, DataFacts(1, 1, 10, 32))
    norms = any(isinstance(part, BatchNormAct) for part in built.modules())
    assert tables.network_facts(recipe.model, DataFacts(1, 1, 10, 32)).norms == norms


@pytest.mark.parametrize("name", NAMES)
def test_only_inception_v3_with_its_head_needs_its_size_for_the_head(name: str) -> None:
    facts = tables.network_facts(make_recipe(f"model={name}").model, DataFacts(1, 1, 10, 299))
    assert facts.auxiliary == (name == "inception-v3")
    plain = make_recipe("model={name: inception-v3, auxiliary: 0}").model
    assert not tables.network_facts(plain, DataFacts(1, 1, 10, 75)).auxiliary


def test_a_network_of_another_package_is_one_block_taken_for_large() -> None:
    facts = tables.network_facts(make_recipe("model=timm:resnet10t").model, DataFacts(1, 1, 10, 224))
    largest = tables.member("resnet152")
    assert facts.blocks == ("network",)
    assert (facts.parameters, facts.activations) == (largest.parameters, largest.activations)
    assert facts.smallest_side == 1


def test_costs_are_parameters_memory_and_multiply_adds_of_each_block() -> None:
    rows = {row.name: row for row in block_costs(make_recipe("model=resnet8"), DataFacts(1, 1, 10, 32))}
    stem, unit, head = rows["stem"], rows["stage2/unit1"], rows["head"]
    assert stem.parameters == 3 * 16 * 9 + 2 * 16
    assert stem.multiply_adds == 32 * 32 * 3 * 16 * 9
    # the image, what the convolution gives, and what the activation gives
    assert stem.activation_bytes == 4 * 32 * 32 * (3 + 16 + 16)
    assert unit.parameters == 9 * 16 * 32 + 9 * 32 * 32 + 4 * 32
    assert unit.multiply_adds == 16 * 16 * (9 * 16 * 32 + 9 * 32 * 32)
    assert (
        unit.activation_bytes == 4 * 16 * 16 * 32 * 4
    )  # two convolutions and two activations; its input is the stem's
    assert head.parameters == 64 * 10 + 10
    assert head.multiply_adds == 64 * 10
    assert head.activation_bytes == 4 * 64


def test_costs_need_neither_memory_nor_time_for_a_large_image() -> None:
    rows = block_costs(make_recipe("model=vgg19"), DataFacts(1, 1, 1000, 10_000))
    assert sum(row.activation_bytes for row in rows) > 100 << 30
