"""Plans against brute force: steps counted one by one, norm groups laid out by image, refusals put to the test."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import make_recipe
from paceline import layouts
from paceline import reconcile as planning
from paceline.errors import PlanError
from paceline.facts import NetworkFacts
from paceline.machine import Machine
from paceline.planning import Plan
from paceline.settings.data import Made
from paceline.settings.placement import Placement
from paceline.settings.recipe import Recipe

SETTINGS = settings(deadline=None, max_examples=200, derandomize=True)
BASE = make_recipe()
MACHINE = Machine(cores=2, memory=1 << 34)


def recipe_of(**changes: object) -> Recipe:
    return BASE.model_copy(update=changes)


def plan_of(recipe: Recipe, **on: object) -> Plan:
    assert recipe.data is not None
    return planning.make_plan(recipe, Placement.model_validate(on), MACHINE, NetworkFacts(1000, 1000))


def lies_well(batch: int, norm_batch: int | None, replicas: int, micro_batch: int) -> bool:
    """Lay out every image of a step, and look at where each norm group ends up."""
    if batch % micro_batch:
        return False
    if norm_batch is None:
        return True
    where = [(image // micro_batch // replicas, image // micro_batch % replicas) for image in range(batch)]
    filled: dict[tuple[int, int], set[int]] = {}  # the norm groups of each (round, replica)
    for image, place in enumerate(where):
        filled.setdefault(place, set()).add(image // norm_batch)
    if norm_batch <= micro_batch:
        # Each group lies in one micro-batch: no group turns up in two of them.
        return sum(map(len, filled.values())) == len(set.union(*filled.values()))
    if norm_batch % micro_batch or any(len(groups) > 1 for groups in filled.values()):
        return False
    circle = norm_batch // micro_batch
    if len([replica for replica in range(replicas) if replica % circle == circle - 1]) * circle != replicas:
        return False  # some replicas have too few neighbors
    for group in range(batch // norm_batch):
        places = {place for place, groups in filled.items() if group in groups}
        if len({(turn, replica // circle) for turn, replica in places}) != 1 or len(places) != circle:
            return False
    return True


def a_divisor_of(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, number + 1) if number % d == 0])


@SETTINGS
@given(data=st.data(), batch=st.integers(1, 60), replicas=st.integers(1, 8))
def test_what_fits_is_what_can_be_laid_out(data: st.DataObject, batch: int, replicas: int) -> None:
    norm_batch = data.draw(st.one_of(st.none(), a_divisor_of(batch)))
    for micro_batch in range(1, batch + 1):
        expected = lies_well(batch, norm_batch, replicas, micro_batch)
        assert layouts.fits(batch, norm_batch, replicas, micro_batch) == expected


@SETTINGS
@given(
    data=st.data(),
    batch=st.integers(1, 60),
    replicas=st.integers(1, 8),
    micro_batch=st.integers(1, 70),
    norm=st.booleans(),
)
def test_every_refusal_names_a_placement_that_is_then_accepted(
    data: st.DataObject, batch: int, replicas: int, micro_batch: int, norm: bool
) -> None:
    norm_batch = data.draw(a_divisor_of(batch)) if norm else None
    assume(not layouts.fits(batch, norm_batch or batch, replicas, micro_batch))
    recipe = recipe_of(global_batch=batch, norm_batch=norm_batch)
    with pytest.raises(PlanError) as caught:
        plan_of(recipe, replicas=replicas, micro_batch=micro_batch)
    suggested = re.findall(r"on\.(\w+)=(\d+)", str(caught.value))
    assert suggested
    for key, value in suggested:
        on = {"replicas": replicas, "micro_batch": micro_batch, key: int(value)}
        plan = plan_of(recipe, **on)
        assert (plan.replicas, plan.micro_batch) == (on["replicas"], on["micro_batch"])


@SETTINGS
@given(batch=st.integers(1, 200), norm_batch=st.integers(1, 300))
def test_a_norm_batch_that_does_not_divide_is_refused_with_the_nearest_that_does(batch: int, norm_batch: int) -> None:
    assume(batch % norm_batch)
    with pytest.raises(PlanError) as caught:
        plan_of(recipe_of(global_batch=batch, norm_batch=norm_batch))
    close = int(str(caught.value).rpartition(" ")[2])
    assert plan_of(recipe_of(global_batch=batch, norm_batch=close)).norm_batch == close
    assert all(batch % n for n in range(1, 301) if abs(n - norm_batch) < abs(close - norm_batch))


@SETTINGS
@given(data=st.data(), batch=st.integers(1, 100), replicas=st.integers(1, 9))
def test_auto_always_finds_a_micro_batch_and_never_works_longer_than_another_would(
    data: st.DataObject, batch: int, replicas: int
) -> None:
    norm_batch = data.draw(st.one_of(st.none(), a_divisor_of(batch)))
    plan = plan_of(recipe_of(global_batch=batch, norm_batch=norm_batch), replicas=replicas)
    images = plan.rounds * plan.micro_batch
    for other in range(1, batch + 1):
        if layouts.fits(batch, norm_batch or batch, replicas, other):
            passes = -(-batch // other // replicas)
            assert images <= passes * other or plan.rounds < passes


@SETTINGS
@given(
    images=st.integers(1, 300),
    batch=st.integers(1, 400),
    hundredths=st.integers(1, 700),
    drop_last=st.booleans(),
)
def test_total_steps_are_those_that_counting_images_gives(
    images: int, batch: int, hundredths: int, drop_last: bool
) -> None:
    assume(not drop_last or images >= batch)
    data = Made(name="generated", images=images, validation_images=1, classes=10, side=8)
    plan = plan_of(
        recipe_of(data=data, global_batch=batch, norm_batch=None, epochs=hundredths / 100, drop_last=drop_last),
        micro_batch=batch,
    )
    pass_images = images if not drop_last else sum(batch for start in range(batch, images + 1, batch) if start)
    assert plan.epoch_images == pass_images
    steps = 0
    while 100 * (steps + 1) * batch <= hundredths * pass_images:
        steps += 1
    assert plan.steps == max(1, steps)
