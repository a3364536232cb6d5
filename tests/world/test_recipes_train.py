"""Every shipped recipe trains: two steps of it, made small, of which the second moves the weights.

A handful belongs to `make test`, all of them to `make test-all`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from conftest import make_plan, make_recipe, make_session
from paceline.command.verify_layouts import shrink
from paceline.job import plan_job, read_placement, read_recipe
from paceline.model.tables import smallest_side
from paceline.optim.build import decays
from paceline.planning import Plan
from paceline.settings import shipped
from paceline.settings.data import Made
from paceline.settings.model import Vgg
from paceline.settings.optimizer import Lamb, Lars
from paceline.settings.read import Tree
from paceline.training.evaluate import evaluate_network
from paceline.training.state import build_state
from paceline.training.step import take_step
from paceline.world import World

WORLD = World(torch.device("cpu"))
QUICK = {
    "graphcore/resnet8",
    "nvcnn/googlenet",
    "graphcore/mobilenet-v3-small",
}


def cases() -> Iterator[Any]:
    for name in shipped.names("recipes"):
        yield pytest.param(name, marks=() if name in QUICK else pytest.mark.long)


def made_small(name: str) -> Plan:
    """A recipe on a few small images: steps of two micro-batches, each a norm group and a block to mix in."""
    text, _ = shipped.page("recipes", name)
    recipe = make_recipe(text=text)
    side = max(32, smallest_side(recipe.model))
    words = ["global_batch=8", "norm_batch=4", "on.micro_batch=4"]
    if not isinstance(recipe.optimizer, Lars | Lamb):  # these have steps of one size whatever the batch is
        words.append(f"optimizer.lr={recipe.optimizer.lr.at(recipe.global_batch) * 8 / recipe.global_batch}")
    if isinstance(recipe.model, Vgg):  # its dense layers are AlexNet's, and would take a billion bytes more
        words.append("model.head=mean")
    if recipe.mix.active:
        words.append("mix.block=4")
    if recipe.augment.side:
        side = 64
        words.append("augment.side={0 steps: 32, 1 steps: 64}")
    data = f"data={{name: generated, images: 16, validation_images: 5, classes: 10, side: {side}}}"
    return make_plan(data, *words, text=text)


@pytest.mark.parametrize("name", list(cases()))
def test_a_recipe_trains_two_steps_and_is_judged(name: str) -> None:
    plan = made_small(name)
    state = build_state(plan, WORLD)
    before = {key: tensor.clone() for key, tensor in state.network.module.state_dict().items()}
    session = make_session(plan, state=state)
    losses = []
    with closing(session.loader.training(0)) as shares:
        for _ in range(2):
            take_step(session, next(shares))
            losses.append(float(state.last_sums[0]) / plan.global_batch)
    assert state.step == 2
    assert not state.bad_steps()
    assert all(0 < loss < 100 for loss in losses), losses
    after = state.network.module.state_dict()
    assert all(tensor.isfinite().all() for tensor in after.values())
    moved = [key for key, tensor in after.items() if tensor.dim() > 1 and not torch.equal(tensor, before[key])]
    assert len(moved) == len([tensor for tensor in after.values() if tensor.dim() > 1])
    judged = evaluate_network(session).row
    assert judged["images"] == 5
    assert judged["loss"] > 0  # and is a number; running statistics of two steps mean nothing yet, so it may be large


@pytest.mark.parametrize("name", list(cases()))
def test_a_recipe_takes_two_steps_on_synthetic_images_as_verify_shrinks_it(name: str) -> None:
    recipe, _ = read_recipe(name, ["data=synthetic", "init.from=null"])
    small, _ = shrink(recipe, above=32)
    assert isinstance(small.data, Made)
    small = small.model_copy(update={"data": small.data.model_copy(update={"name": "synthetic"})})
    placement, placed = read_placement(None, ["on.device=cpu", "on.cpu_threads=1"])
    plan = plan_job(name, small, placement, None, Tree(), placed).plan
    state = build_state(plan, WORLD)
    with closing(make_session(plan, state=state).loader.training(0)) as shares:
        for _ in range(2):
            take_step(make_session(plan, state=state), next(shares))
    assert state.step == 2
    assert not state.bad_steps()
    assert 0 < float(state.last_sums[0]) < math.inf  # a rate for a batch of 16,384 is too high for one of 32


@pytest.mark.parametrize(
    ("name", "left_alone"),
    [
        ("graphcore/resnet50-lars-3200", 2 * 53),  # every norm; the bias of the head decays
        ("graphcore/resnet50-pytorch-16416", 2 * 53 + 1),
        ("nvidia/resnet50", 2 * 49),  # not the norms of its four projections
        ("ffcv/resnet50-16", 2 * 49),
        ("nvcnn/resnet50", 0),
    ],
)
def test_weight_decay_leaves_alone_what_it_did(name: str, left_alone: int) -> None:
    plan = made_small(name)
    named = build_state(plan, WORLD).network.module.named_parameters()
    assert sum(not decays(plan.recipe.weight_decay, key, parameter) for key, parameter in named) == left_alone
