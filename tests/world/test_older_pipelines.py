"""The pipelines of older configurations: networks that are cut where those were take the steps of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import make_plan, make_recipe
from paceline.command.verify import LIMIT
from paceline.job import read_placement, read_recipe
from paceline.planning import Plan
from paceline.settings import shipped
from paceline.settings.configurations import Configuration, configurations
from paceline.settings.optimizer import Lars
from paceline.training.trials import Trial

STEPS = 2


FAMILIES = (
    "mk1_resnet50_16ipus", "mk2_resnet50_bn_16ipus", "resnet50-16ipu-mk1", "mk2_resnext101_16ipus",
    "mk2_efficientnet_b4_g1_16ipus", "mk2_efficientnet_b4_g16_16ipus", "efficientnet-b4-g16-4ipu-mk2",
    "efficientnet-b4-g16-gn", "efficientnet_b4_g16_16ipus", "efficientnet-b0-g16-gn-pod16", "efficientnet-b0-g16-gn",
    "efficientnet-b0-16ipu-mk1", "mobilenet-v3-large",
)  # fmt: skip
"""One of each kind of cut, by what it was called."""


def plan_of(configuration: Configuration, *words: str) -> Plan:
    """Its recipe on a few small images, in float64."""
    text, _ = shipped.page("recipes", configuration.recipe)
    recipe = make_recipe(text=text)
    data = "data={name: generated, images: 16, validation_images: 5, classes: 10, side: 32}"
    small = [data, "global_batch=8", "norm_batch=4", "on.precision=fp64"]
    if not isinstance(recipe.optimizer, Lars):  # which has steps of one size whatever the batch is
        small.append(f"optimizer.lr={recipe.optimizer.lr.at(recipe.global_batch) * 8 / recipe.global_batch}")
    if recipe.mix.active:
        small.append("mix.block=4")
    return make_plan(*small, *words, text=text)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_that_is_cut_as_it_was_takes_the_same_steps(tmp_path: Path, name: str) -> None:
    configuration = next(each for each in configurations() if each.name == name)
    placement, _ = read_placement(configuration.placement, [])
    lead, follow = tmp_path / "lead", tmp_path / "follow"
    lead.mkdir()
    follow.mkdir()
    leader = Trial(lead, None, STEPS).lead(plan_of(configuration, "on.micro_batch=8"))
    splits = f"on.splits=[{', '.join(placement.splits)}]"
    staged = plan_of(configuration, "on.micro_batch=4", f"on.stages={placement.stages}", splits)
    assert staged.stages > 1
    differences = Trial(follow, None, STEPS).follow(staged, leader)
    assert all(found.judged <= LIMIT for found in differences.values()), differences


@pytest.mark.long
def test_every_kind_of_cut_is_among_these() -> None:
    kinds: dict[bool, set[Any]] = {True: set(), False: set()}
    for each in configurations():
        placement, _ = read_placement(each.placement, [])
        if placement.stages > 1:
            model = read_recipe(each.recipe, [])[0].model.name
            kinds[each.name in FAMILIES].add((model, placement.stages, placement.splits))
    assert kinds[False] <= kinds[True]
    assert len(kinds[True]) == len(FAMILIES)
