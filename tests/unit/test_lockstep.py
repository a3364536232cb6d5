"""Layouts in lockstep: recipes that multiply rounding agree, and every planted difference of 1e-9 is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import SMALL, make_plan
from paceline.command.verify import LIMIT
from paceline.planning import Plan
from paceline.training.lockstep import (
    ONE_BIT,
    Differences,
    Lead,
    Measure,
    first_loss_amplification,
    follow,
    lead,
    read_lead,
)
from paceline.training.restore import restore_newest
from paceline.training.session import open_session
from paceline.training.step import take_step
from paceline.world import World
from plants_made import PLANTED, PLANTS

STEPS = 2
MASKED = """
model: {name: efficientnet-cifar, width: 0.25, depth: 0.5, dropout: 0.2, survival: 0.5}
data: {name: generated, images: 96, validation_images: 8, classes: 10, side: 16}
global_batch: 16
norm_batch: 8
epochs: 2
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
loss: {label_smoothing: 0.1}
augment: {pad: 2, flip: true}
mix: {mixup: 0.2, cutmix: {name: logarithmic, kept: 0.85}, block: 4}
ema: {decay: 0.9}
"""
EFFICIENTNET = "model={name: efficientnet-b0, dropout: 0.2}"


@dataclass(frozen=True)
class Case:
    """A recipe that multiplies rounding, or might."""

    words: tuple[str, ...]
    text: str = SMALL
    planted: tuple[str, ...] = ()
    """What is planted; all that the recipe has a place for, if nothing is named."""

    def plan(self, *words: str) -> Plan:
        return make_plan("on.precision=fp64", "on.cpu_threads=1", *self.words, *words, text=self.text)


CASES = {
    "sgd": Case(()),
    "lars": Case(("optimizer={name: lars, lr: 2, trust_coefficient: 0.02, decay: 1e-4}", "clip.norm=0.5")),
    "larc": Case(("optimizer={name: larc, lr: 0.1, mode: scale}",)),
    "lamb": Case(("optimizer={name: lamb, lr: 0.01, scales: all}", "weight_decay.rate=0.02")),
    "adamw": Case(("optimizer={name: adamw, lr: 0.01, epsilon: 1e-15}",)),
    "muon": Case(("optimizer={name: muon, lr: 0.02}", "weight_decay.rate=0.01")),
    "rmsprop": Case(("optimizer={name: rmsprop, lr: 0.1, form: torch, epsilon: 1e-8}",)),
    "few-numbers": Case(("norm_batch=1",)),
    "group-norm": Case(("norm=group",)),
    "masked": Case((), MASKED, planted=("mask",)),
}
LONG = {
    "vgg-bias-adamw": Case(
        ("model={name: vgg11-bn, head: mean}", "data.side=32", "optimizer={name: adamw, lr: 0.001}")
    ),
    "masked-sgd": Case((), MASKED),
    "masked-lamb": Case(("optimizer={name: lamb, lr: 0.01}",), MASKED),
    "masked-muon": Case(("optimizer={name: muon, lr: 0.02}",), MASKED),
    "efficientnet-momentum": Case((EFFICIENTNET, "data.side=32", "norm_batch=8", "optimizer.lr=0.5")),
    "mobilenet-rmsprop": Case(
        ("model=mobilenet-v3-small", "data.side=32", "norm_batch=8",
         "optimizer={name: rmsprop, lr: 0.05, form: tensorflow, epsilon: 1e-10}")
    ),
    "googlenet-adamw": Case(("model=googlenet", "data.side=32", "optimizer={name: adamw, lr: 0.01}")),
    "resnet50-lamb": Case(("model=resnet50", "data.side=32", "norm_batch=8", "optimizer={name: lamb, lr: 0.01}")),
    "resnext-larc": Case(("model=resnext11", "data.side=16", "optimizer={name: larc, lr: 0.1, mode: clip}")),
    "alexnet-larc": Case(("model=alexnet", "data.side=63", "optimizer={name: larc, lr: 0.1, mode: clip}")),
    "inception-lars": Case(
        ("model={name: inception-v3, auxiliary: 0}", "data.side=75", "norm_batch=8", "optimizer={name: lars, lr: 2}")
    ),
}  # fmt: skip


def cases() -> Iterator[Any]:
    for name, case in (CASES | LONG).items():
        yield pytest.param(case, id=name, marks=pytest.mark.long if name in LONG else ())


def led(case: Case, folder: Path) -> Lead:
    plan = case.plan("on.micro_batch=16")
    folder.mkdir()
    with open_session(plan, folder) as session:
        lead(session, folder, STEPS)
    return read_lead(folder, STEPS, plan.global_batch)


def followed(case: Case, leader: Lead, folder: Path) -> Differences:
    norm_batch = case.plan("on.micro_batch=16").norm_batch or 4
    folder.mkdir()
    with open_session(case.plan(f"on.micro_batch={max(4, norm_batch)}"), folder) as session:
        return follow(session, leader.folder, STEPS)


def plants(case: Case) -> Iterator[str]:
    """What a recipe has a place for."""
    norms = case.plan("on.micro_batch=16").norm_batch is not None
    for name in case.planted or PLANTS:
        if (name != "mask" or case.text == MASKED) and (name != "norm sum" or norms):
            yield name


@pytest.mark.parametrize("case", list(cases()))
def test_a_recipe_takes_the_same_steps_on_another_layout_and_what_is_planted_is_found(
    tmp_path: Path, case: Case
) -> None:
    leader = led(case, tmp_path / "lead")
    honest = followed(case, leader, tmp_path / "follow")
    assert all(found.judged <= LIMIT for found in honest.values()), honest
    for name in plants(case):
        with PLANTS[name].planted():
            differences = followed(case, leader, tmp_path / name)
        assert differences[PLANTS[name].part].judged > LIMIT, (name, differences, leader.amplification)


@pytest.mark.parametrize("amplification", [1.0, 30.0, 500.0, 2e3, 2e4, 4e4])
def test_a_difference_of_1e_9_is_found_whatever_the_amplification_and_rounding_is_not(amplification: float) -> None:
    allowed = Measure(1.0, amplification).allowed
    assert PLANTED / allowed > LIMIT
    assert 50 * amplification * ONE_BIT / allowed < LIMIT
    assert 1 <= allowed <= amplification


def test_the_leader_trains_as_any_run_does(tmp_path: Path) -> None:
    case = CASES["masked"]
    leader = led(case, tmp_path / "lead")
    with open_session(case.plan("on.micro_batch=16"), tmp_path) as session:
        restore_newest(session)
        with closing(session.loader.training(0)) as batches:
            for _ in range(STEPS):
                take_step(session, next(batches))
        tensors = session.state.tensors()
    for group, members in tensors.items():
        for name, tensor in members.items():
            assert torch.equal(tensor, leader.tensors[f"{group}.{name}"]), name


@pytest.mark.parametrize(("model", "norm_batch", "least", "most"), [("resnet56", 1, 2, 1000), ("resnet8", 16, 1, 2)])
def test_noise_in_the_weights_tells_how_much_the_first_loss_multiplies_rounding(
    tmp_path: Path, model: str, norm_batch: int, least: float, most: float
) -> None:
    words = (f"model={model}", "on.precision=fp64", "on.micro_batch=16", f"norm_batch={norm_batch}")
    with open_session(make_plan(*words), tmp_path) as session:
        assert least <= first_loss_amplification(session) <= most
        after = {name: tensor.clone() for name, tensor in session.state.network.module.state_dict().items()}
        assert all(parameter.grad is None for parameter in session.state.network.parameters)
        restore_newest(session)
        for name, tensor in session.state.network.module.state_dict().items():
            assert torch.equal(tensor, after[name]), name


def test_replicas_that_differ_from_each_other_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = led(CASES["sgd"], tmp_path / "lead")
    monkeypatch.setattr(World, "all_equal", lambda _world, _number: False)
    differences = followed(CASES["sgd"], leader, tmp_path / "follow")
    assert differences["gradients"] == (math.inf, math.inf, "gradient of any parameter, between replicas, step 2")
    assert differences["update"].judged == math.inf


def test_an_image_that_no_replica_takes_is_found(tmp_path: Path) -> None:
    case = CASES["sgd"]
    leader = led(case, tmp_path / "lead")
    (tmp_path / "follow").mkdir()
    with open_session(case.plan("on.micro_batch=4"), tmp_path / "follow") as session:
        shares = session.loader.training

        def short(start: int) -> Iterator[Any]:
            for batches in shares(start):
                yield batches[:-1]

        session.loader.training = short  # type: ignore[method-assign, assignment]
        differences = follow(session, leader.folder, 1)
    assert differences["inputs"].judged == math.inf
