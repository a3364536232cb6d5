"""Fine-tuning is the same run on every layout too, and starts from another run with one command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import fingerprint, newest_step, write_small
from safetensors.torch import load
from torch import Tensor

from conftest import Paceline, make_plan
from paceline import checkpoint
from paceline.training.state import build_state, initialize_state
from paceline.training.trials import Outcome, Trial, compare_outcomes
from paceline.world import World

EXACT = 1e-12
LAYOUTS = [
    pytest.param(
        ("on.replicas=2", "on.micro_batch=4", "on.recompute=all"), id="2x4-recomputed", marks=pytest.mark.long
    ),
    pytest.param(("on.replicas=3", "on.micro_batch=4"), id="3x4"),
]
STILL = ("stem.", "stage1/", "stage3/")
TUNED = (
    "model=efficientnet-cifar", "model.survival=0.5", "model.dropout=0.5", "data.side=16",
    "freeze=[stem, stage1, stage3]", "lr_factors={all: 0.5, head: 10, top: 0}", "optimizer.lr=0.0002",
    "weight_decay.rate=0.001",
)  # fmt: skip
HEADED = ("model=googlenet", "data.side=16", "freeze=[stem]", "optimizer.lr=0.0001")
"""Calm enough for norm groups of four numbers, which is what its last pictures leave."""


def run(folder: Path, steps: int, *words: str) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    return Trial(folder, None, steps).finish(make_plan("on.precision=fp64", "on.cpu_threads=1", *words))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("tuned"), 4, *TUNED, "on.micro_batch=16")


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("headed"), 2, *HEADED, "on.micro_batch=16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_a_fine_tuning_run(tmp_path: Path, tuned: Outcome, layout: tuple[str, ...]) -> None:
    found = compare_outcomes(tuned, run(tmp_path, 4, *TUNED, *layout))
    assert max(found.values()) <= EXACT, found


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_a_run_with_auxiliary_heads(
    tmp_path: Path, headed: Outcome, layout: tuple[str, ...]
) -> None:
    found = compare_outcomes(headed, run(tmp_path, 2, *HEADED, *layout))
    assert max(found.values()) <= EXACT, found
    assert any(
        name.startswith("optimizer.aux2.") and "momentum" in name and value.any()
        for name, value in headed.tensors.items()
    )


def test_computing_again_across_replicas_that_share_norm_groups_is_the_same_run(tmp_path: Path) -> None:
    words = ("norm_batch=8", "freeze=[stage1]")
    one = run(tmp_path / "one", 4, *words, "on.micro_batch=16")
    two = run(tmp_path / "two", 4, *words, "on.replicas=2", "on.micro_batch=4", "on.recompute=all")
    found = compare_outcomes(one, two)
    assert max(found.values()) <= EXACT, found


def test_a_trial_leaves_frozen_blocks_where_they_began_and_moves_the_others(tuned: Outcome) -> None:
    plan = make_plan(*TUNED, "on.precision=fp64")
    state = build_state(plan, World(torch.device("cpu")))
    initialize_state(state, plan)
    start = state.network.module.state_dict()
    moved = {name for name, value in start.items() if not torch.equal(value, tuned.tensors[f"network.{name}"])}
    kept = {name for name in start if name.startswith(STILL)}
    kept |= {name for name in start if name.startswith("top.") and "running_" not in name}  # its factor is 0
    assert moved == start.keys() - kept
    momenta = [name.removeprefix("optimizer.") for name in tuned.tensors if name.endswith(".momentum")]
    assert not any(name.startswith(STILL) for name in momenta)


def network_of(run_folder: Path, step: int) -> dict[str, Tensor]:
    return load(checkpoint.read(run_folder / "checkpoints" / checkpoint.name_of(step))["network.safetensors"])


@pytest.mark.long
def test_one_command_starts_from_another_run_and_says_what_matched(paceline: Paceline, tmp_path: Path) -> None:
    recipe = write_small(tmp_path)
    assert paceline("train", recipe, "--out", "base").returncode == 0
    words = (
        "data.classes=7", "init.from=base", "freeze=[stem, stage1]", "lr_factors.head=10", "--out", "run",
        "on.save=3 steps",
    )  # fmt: skip
    done = paceline("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    said = "loaded 35 tensors; these keep their initial values: head.dense.weight, head.dense.bias"
    said = f"init.from {tmp_path}/base: {said}"
    assert done.stdout.count(said) == 1
    assert said in (tmp_path / "run" / "log.txt").read_text()
    base, start, end = (
        network_of(tmp_path / "base", 6),
        network_of(tmp_path / "run", 0),
        network_of(tmp_path / "run", 6),
    )
    fresh_head = {"head.dense.weight", "head.dense.bias"}
    assert all(torch.equal(value, start[name]) for name, value in base.items() if name not in fresh_head)
    assert start["head.dense.bias"].shape == (7,)
    still = {name for name, value in end.items() if torch.equal(value, start[name])}
    assert still == {name for name in end if name.startswith(("stem.", "stage1/"))}

    # Taken up again without what it started from, it is still that run.
    expected = fingerprint(tmp_path / "run")
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / checkpoint.name_of(6))
    assert newest_step(tmp_path / "run") == 3
    resumed = paceline("resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert "init.from" not in resumed.stdout
    assert fingerprint(tmp_path / "run") == expected
    assert paceline("validate", "run").returncode == 0


@pytest.mark.long
def test_several_replicas_start_from_the_same_weights(paceline: Paceline, tmp_path: Path) -> None:
    recipe = write_small(tmp_path)
    assert paceline("train", recipe, "epochs=0.2", "--out", "base").returncode == 0
    done = paceline("train", recipe, "init.from=base", "epochs=0.2", "--out", "run", "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"init.from {tmp_path}/base: loaded 37 tensors\n") == 1
    missing = paceline("train", recipe, "init.from=gone.pth", "--out", "other", "--replicas", "2")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: init.from: gone.pth is not there; give a run folder")
    assert len(missing.stderr.splitlines()) == 1
