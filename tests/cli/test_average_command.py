"""paceline average: what a user types, and that the outcome is what a calculation by hand gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import SMALL, Paceline, make_plan, make_session, run_in
from paceline import checkpoint
from paceline.command import average as verb
from paceline.record import latest, rows_of
from paceline.training.averaging import recalibrate
from paceline.training.restore import copy_tensors
from paceline.training.state import build_state, initialize_state
from paceline.world import World

STEPS = (6, 12, 18)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests copy."""
    folder = tmp_path_factory.mktemp("average")
    (folder / "small.yaml").write_text(SMALL)
    words = ["train", "small.yaml", "epochs=3", "average.last=2", "--out", "run", "on.keep_last=9", "on.save=6 steps"]
    done = run_in(folder, *words)
    assert done.returncode == 0, done.stderr
    assert "of the mean of the last 2 checkpoints" in done.stdout
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copy(made / "small.yaml", tmp_path)
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def network(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / checkpoint.name_of(step) / "network.safetensors")


def by_hand(run: Path, weights: dict[int, float]) -> dict[str, Tensor]:
    """The weighted sum of checkpoints."""
    some = {step: network(run, step) for step in weights}
    return {
        name: sum((weight * some[step][name].double() for step, weight in weights.items()), torch.zeros(()))
        for name in some[STEPS[-1]]
    }


def ask(run: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> Any:
    """The command in this process, and what it says as JSON."""
    full: dict[str, Any] = {"last": None, "decay": None, "recalibrate": None, **options}
    assert verb.run(run, ["on.cpu_threads=1"], data=None, as_json=True, **full) == 0
    return json.loads(capsys.readouterr().out)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], but: str = "nothing") -> bool:
    assert found.keys() == expected.keys()
    return all(
        torch.allclose(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
        for name, tensor in found.items()
        if but not in name
    )


@pytest.mark.parametrize(
    ("options", "weights", "method"),
    [
        ({}, {6: 1 / 3, 12: 1 / 3, 18: 1 / 3}, "mean"),
        ({"last": 2}, {12: 0.5, 18: 0.5}, "mean"),
        ({"last": 1}, {18: 1.0}, "mean"),
        ({"decay": 0.8}, {6: 0.64, 12: 0.16, 18: 0.2}, "exponential"),
    ],
    ids=str,
)
def test_the_outcome_is_what_a_calculation_by_hand_gives(
    run: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], weights: dict[int, float], method: str
) -> None:
    row = ask(run, capsys, **options)
    found = load_file(run / "averaged" / "network.safetensors")
    assert close(found, by_hand(run, weights))
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in network(run, 18).items()}
    assert row["steps"] == list(weights)
    assert row["method"] == method
    assert row["images"] == 37
    judged = latest(rows_of(run), "validation")[-1]
    assert row["last_top1"] == judged["top1"]
    if options == {"last": 1}:  # nothing is averaged, so that it must be the last checkpoint again
        assert row["loss"] == judged["loss"]
    assert json.loads((run / "averaged" / "average.json").read_text()) == row
    assert rows_of(run)[-1] == {"kind": "average", **row}


def test_recalibrated_statistics_are_new_and_weights_are_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(run, capsys)
    mean = load_file(run / "averaged" / "network.safetensors")
    row = ask(run, capsys, recalibrate=90)
    found = load_file(run / "averaged" / "network.safetensors")
    assert row["recalibrated_images"] == 96
    assert plain["recalibrated_images"] is None
    assert row["loss"] != plain["loss"]
    for name, tensor in found.items():
        assert torch.equal(tensor, mean[name]) != ("running_" in name), name


def test_recalibrated_statistics_are_of_images_as_large_as_the_last(
    paceline: Paceline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    words = ["data.side=16", "on.precision=fp64"]
    done = paceline("train", "small.yaml", *words, "augment.side={0%: 8, 50%: 16}", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert ask(tmp_path / "run", capsys, recalibrate=40)["recalibrated_images"] == 48
    found = load_file(tmp_path / "run" / "averaged" / "network.safetensors")
    session = make_session(make_plan(*words))  # every image as large as the last ones of that run
    expected = session.state.network.module.state_dict()
    copy_tensors(found, expected, "test")
    recalibrate(session, 40, session.plan.steps)
    assert sum("running_" in name for name in found) > 0
    assert all(torch.allclose(tensor, expected[name], rtol=1e-9) for name, tensor in found.items())


def test_the_end_of_a_run_averages_in_the_same_way(made: Path) -> None:
    rows = rows_of(made / "run")
    assert [row["kind"] for row in rows[-3:]] == ["checkpoint", "average", "end"]
    assert rows[-2]["steps"] == [12, 18]
    assert rows[-2]["last_top1"] == latest(rows, "validation")[-1]["top1"]
    assert close(
        load_file(made / "run" / "averaged" / "network.safetensors"), by_hand(made / "run", {12: 0.5, 18: 0.5})
    )


def test_a_run_that_was_killed_before_its_average_makes_it_when_resumed(paceline: Paceline, run: Path) -> None:
    expected = (run / "averaged" / "network.safetensors").read_bytes()
    shutil.rmtree(run / "averaged")
    lines = (run / "record.jsonl").read_text().splitlines(keepends=True)
    (run / "record.jsonl").write_text("".join(lines[:-2]))
    done = paceline("resume", "run")
    assert done.returncode == 0, done.stderr
    assert (run / "averaged" / "network.safetensors").read_bytes() == expected
    assert [row["kind"] for row in rows_of(run)[-3:]] == ["start", "average", "end"]


@pytest.mark.long
def test_another_run_starts_from_the_average_that_the_command_wrote(paceline: Paceline, run: Path) -> None:
    done = paceline("average", "run", "on.replicas=2", "on.micro_batch=4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("last checkpoint  18 ")
    assert lines[2].startswith("mean             6, 12, 18 ")
    assert "init.from=run/averaged/network.safetensors" in lines[-1]
    plan = make_plan(f"init.from={run}/averaged/network.safetensors")
    state = build_state(plan, World(torch.device("cpu")))
    initialize_state(state, plan)
    started = state.network.module.state_dict()
    averaged = load_file(run / "averaged" / "network.safetensors")
    assert close(averaged, by_hand(run, dict.fromkeys(STEPS, 1 / 3)))
    assert averaged.keys() == started.keys()
    assert all(torch.equal(tensor, started[name]) for name, tensor in averaged.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--last", "4"], "there are 3 (6, 12, 18); write --last 3 or less"),
        (["run", "--last", "2", "--decay", "0.5"], "--last and --decay: write one"),
        (["run", "--last", "0"], "--last 0: expected how many"),
        (["run", "--decay", "1"], "--decay 1: expected a share"),
        (["run", "--recalibrate", "0"], "--recalibrate 0: expected a number of images"),
        (["run", "epochs=3"], "only on.* words may change"),
        (["nowhere"], "nowhere: this is no run folder"),
    ],
    ids=str,
)
def test_what_cannot_be_averaged_is_one_line(paceline: Paceline, run: Path, words: list[str], message: str) -> None:
    assert run.is_dir()
    done = paceline("average", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def test_a_run_without_trained_checkpoints_has_nothing_to_average(paceline: Paceline, run: Path) -> None:
    for step in STEPS:
        shutil.rmtree(run / "checkpoints" / checkpoint.name_of(step))
    done = paceline("average", "run")
    assert done.returncode == 2
    assert done.stderr == "error: run: there is no checkpoint of a trained step to average; train this run first\n"
