"""Pipelines in lockstep with the whole network: each stage's part is compared, and what is planted in one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import make_plan
from paceline.command.verify import LIMIT
from paceline.planning import Plan
from paceline.training.lockstep import STEP_PARTS, Lead
from paceline.training.trials import Trial
from plants_made import PLANTS, PlantedTrial

WORDS = (
    "model={name: efficientnet-cifar, width: 0.25, depth: 0.5, dropout: 0.2, survival: 0.5}", "data.side=16",
    "mix.mixup=0.2", "mix.block=4", "norm_batch=8", "global_batch=16", "clip.norm=1", "ema.decay=0.9",
)  # fmt: skip
LAYOUTS = {
    "2 stages": ("on.stages=2", "on.micro_batch=8", "on.pipeline=interleaved"),
    "3 stages": ("on.stages=3", "on.micro_batch=8", "on.pipeline=sequential"),
    "2 stages of 2 parts": ("on.stages=2", "on.micro_batch=8", "on.virtual_stages=2", "on.pipeline=interleaved"),
    "2 replicas of 2 stages": ("on.stages=2", "on.replicas=2", "on.micro_batch=4"),
}


def plan_of(*words: str) -> Plan:
    return make_plan("on.precision=fp64", *WORDS, *words)


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Lead:
    return Trial(tmp_path_factory.mktemp("lead"), None, 2).lead(plan_of("on.micro_batch=16"))


def followed(folder: Path, leader: Lead, layout: str, plant: str = "", process: int = 0) -> Any:
    trial = PlantedTrial(folder, None, 2)
    trial.plant, trial.process = plant, process
    return trial.follow(plan_of(*LAYOUTS[layout]), leader)


@pytest.mark.parametrize(
    "layout", [name if name == "2 stages" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_every_part_of_a_pipeline_is_that_of_the_whole_network(tmp_path: Path, leader: Lead, layout: str) -> None:
    differences = followed(tmp_path, leader, layout)
    assert all(found.judged <= LIMIT for found in differences.values()), differences
    assert all(differences[part].where for part in STEP_PARTS if part != "inputs"), "nothing was compared"


@pytest.mark.parametrize(
    ("plant", "layout", "process"),
    [
        ("gradient", "2 stages", 1),
        *(
            pytest.param(plant, *where, marks=pytest.mark.long)
            for plant in PLANTS
            for where in (("2 stages", 0), ("3 stages", 1), ("2 stages of 2 parts", 0), ("2 replicas of 2 stages", 1))
            if plant != "label" or where[1] == 0  # which the first stage alone has
        ),
        pytest.param("gradient", "2 replicas of 2 stages", 3, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_difference_of_1e_9_in_one_stage_is_found(
    tmp_path: Path, leader: Lead, plant: str, layout: str, process: int
) -> None:
    differences = followed(tmp_path, leader, layout, plant, process)
    assert differences[PLANTS[plant].part].judged > LIMIT, differences
