"""The endless list: every image once per epoch and in the same step, whatever the layout and wherever one starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import make_recipe
from paceline import reconcile as planning
from paceline.data.load.order import evaluation_images, micro_batch_positions, training_order
from paceline.facts import NetworkFacts
from paceline.machine import Machine
from paceline.planning import Plan
from paceline.settings.data import Made
from paceline.settings.placement import Placement
from paceline.settings.recipe import NoNorm

SETTINGS = settings(deadline=None, max_examples=80, derandomize=True)
BASE = make_recipe()
MACHINE = Machine(cores=2, memory=1 << 34)


@dataclass(frozen=True)
class Case:
    """What a plan of this page depends on."""

    images: int
    batch: int
    replicas: int
    micro_batch: int
    drop_last: bool
    seed: int

    def plan(self, replicas: int | None = None, micro_batch: int | None = None, validation: int = 1) -> Plan:
        data = Made(name="generated", images=self.images, validation_images=validation, classes=10, side=8)
        changes = {"data": data, "global_batch": self.batch, "drop_last": self.drop_last, "seed": self.seed}
        recipe = BASE.model_copy(update={**changes, "norm_batch": None, "norm": NoNorm(name="none")})
        placement = Placement(replicas=replicas or self.replicas, micro_batch=micro_batch or self.micro_batch)
        return planning.make_plan(recipe, placement, MACHINE, NetworkFacts(1, 1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    images, batch = draw(st.integers(1, 80)), draw(st.integers(1, 60))
    drop_last = draw(st.booleans())
    assume(not drop_last or images >= batch)
    micro_batch = draw(st.sampled_from([m for m in range(1, batch + 1) if batch % m == 0]))
    return Case(images, batch, draw(st.integers(1, 7)), micro_batch, drop_last, draw(st.integers(-5, 5)))


def images_of(plan: Plan, step: int) -> list[list[list[int]]]:
    """The image numbers of each micro-batch of each replica in a step."""
    order = training_order(plan)
    return [
        [order.images(part).tolist() for part in micro_batch_positions(plan, step, r)] for r in range(plan.replicas)
    ]


def listed(plan: Plan, steps: range) -> list[int]:
    """The image numbers of these steps in the order of the endless list, put together from all replicas."""
    order = training_order(plan)
    positions = [part for step in steps for r in range(plan.replicas) for part in micro_batch_positions(plan, step, r)]
    return order.images(np.sort(np.concatenate(positions))).tolist() if positions else []


@SETTINGS
@given(case=cases())
def test_every_image_comes_once_per_epoch(case: Case) -> None:
    plan = case.plan()
    seen = listed(plan, range(-(-3 * plan.epoch_images // case.batch)))
    length = plan.epoch_images
    for epoch in range(3):
        part = seen[epoch * length : (epoch + 1) * length]
        assert len(set(part)) == length
        assert set(part) <= set(range(case.images))
        if not case.drop_last:
            assert len(part) == case.images


@SETTINGS
@given(case=cases(), step=st.integers(0, 10**9))
def test_a_step_has_the_same_images_on_every_layout(case: Case, step: int) -> None:
    whole = images_of(case.plan(replicas=1, micro_batch=case.batch), step)[0][0]
    parts = images_of(case.plan(), step)
    # Micro-batch k is run by replica k mod R, in round k div R.
    count = case.batch // case.micro_batch
    together = [parts[k % case.replicas][k // case.replicas] for k in range(count)]
    assert [image for part in together for image in part] == whole
    assert sum(map(len, parts)) == count
    assert all(len(part) == case.micro_batch for replica in parts for part in replica)


@SETTINGS
@given(case=cases(), start=st.integers(0, 200))
def test_starting_at_any_step_gives_the_rest_of_the_same_list(case: Case, start: int) -> None:
    plan = case.plan()
    after = listed(plan, range(start, start + 3))
    assert listed(plan, range(start + 3))[start * case.batch :] == after


@SETTINGS
@given(case=cases())
def test_one_order_asked_in_any_order_gives_the_same_images(case: Case) -> None:
    plan = case.plan()
    order, again = training_order(plan), training_order(plan)
    positions = np.arange(5 * plan.epoch_images, dtype=np.int64)
    forwards = [int(order.images(positions[i : i + 1])[0]) for i in range(len(positions))]
    backwards = [int(again.images(positions[i : i + 1])[0]) for i in reversed(range(len(positions)))]
    assert forwards == backwards[::-1] == training_order(plan).images(positions).tolist()


@SETTINGS
@given(case=cases(), count=st.integers(1, 500))
def test_every_validation_image_is_judged_once(case: Case, count: int) -> None:
    plan = case.plan(validation=count)
    parts = [part for replica in range(plan.replicas) for part in evaluation_images(plan, replica)]
    assert sorted(image for part in parts for image in part.tolist()) == list(range(count))
    assert all(0 < len(part) <= plan.evaluation_batch for part in parts)
