"""What is left to the machine: several processes train by what the first decides, and a probe may come before a run."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import write_small

from conftest import environment, make_plan, make_recipe
from paceline import rendezvous, settling
from paceline.errors import PlanError
from paceline.facts import Line, Probe
from paceline.job import Job, plan_job
from paceline.launch import Launch
from paceline.machine import Machine, this_machine
from paceline.planning import Plan
from paceline.probing import store_probe, stored_probe
from paceline.ran_out import remember
from paceline.record import rows_of
from paceline.settings.placement import AUTO, Placement
from paceline.settings.read import Tree
from paceline.settling import probe_apart, settled
from paceline.training.probe import take_probe
from replicas_made import in_threads

WORDS = ("small.yaml", "--device", "cpu", "on.cpu_threads=1", "on.sinks=[]", "on.data_on_device=false", "--out", "run")


@pytest.fixture(scope="module")
def small_probe() -> Probe:
    return take_probe(make_plan(), this_machine())


@pytest.fixture
def third(small_probe: Probe) -> Probe:
    """A probe by which an image takes a third of a GiB."""
    line = Line(0.0, 2**30 / 3)
    return replace(small_probe, first=line, following=line)


def keep(folder: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a probe into a cache of its own."""
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    assert store_probe(make_plan("on.data_on_device=false"), this_machine(), probe)
    return str(folder)


def train(folder: Path, *ranks: tuple[dict[str, str], tuple[str, ...]]) -> list[tuple[int, str]]:
    """Train in processes, each with words and an environment of its own; gives status and errors of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        count, port = str(len(ranks)), str(free.getsockname()[1])
    launch = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *WORDS, "on.timeout=100", *words],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment() | launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | env,
        )
        for rank, (env, words) in enumerate(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in processes]
    return [(process.returncode, line) for process, line in zip(processes, said, strict=True)]


@pytest.mark.parametrize(
    ("probed", "memories", "size", "origin"),
    [
        pytest.param((True, False), ("3 GiB", "3 GiB"), 8, "a probe of", marks=pytest.mark.long),
        ((True, False), ("3 GiB", "2 GiB"), 4, "a probe of"),  # the smaller memory counts, whoever has it
        pytest.param((False, True), ("2 GiB", "2 GiB"), 8, "an estimate", marks=pytest.mark.long),
        pytest.param((True, True), ("2 GiB", "3 GiB"), 4, "a probe of", marks=pytest.mark.long),
    ],
)
def test_replicas_with_different_caches_train_by_what_the_first_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: Probe, probed: tuple[bool, bool],
    memories: tuple[str, str], size: int, origin: str,
) -> None:  # fmt: skip
    write_small(tmp_path)
    full, empty = keep(tmp_path / "full", third, monkeypatch), str(tmp_path / "empty")
    ends = train(
        tmp_path,
        *(
            ({"PACELINE_CACHE": full if has else empty}, (f"on.memory={memory}",))
            for has, memory in zip(probed, memories, strict=True)
        ),
    )
    assert [status for status, _ in ends] == [0, 0], ends
    row = next(row for row in rows_of(tmp_path / "run") if row["kind"] == "start")
    assert row["placement"]["micro_batch"] == size
    assert row["micro_batch_from"].startswith(origin)


@pytest.mark.parametrize("has_probe", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_pipeline_is_balanced_by_the_first_process_s_probe_and_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_probe: Probe, has_probe: bool
) -> None:
    write_small(tmp_path)
    slow_head = [replace(block, forward=1.0 + 9 * (block.name == "head"), backward=0.0) for block in small_probe.blocks]
    cache = keep(tmp_path / "full", replace(small_probe, blocks=tuple(slow_head)), monkeypatch)
    first = {"PACELINE_CACHE": cache if has_probe else str(tmp_path / "empty")}
    words = ("on.stages=2", "on.micro_batch=4")
    ends = train(tmp_path, (first, words), ({"PACELINE_CACHE": str(tmp_path / "empty")}, words))
    assert [status for status, _ in ends] == [0, 0], ends
    rows = rows_of(tmp_path / "run")
    row = next(row for row in rows if row["kind"] == "start")
    assert row["placement"]["splits"] == (["head"] if has_probe else [])
    assert row["stage_shares"]["of"] == ("time" if has_probe else "multiply-adds")
    assert sum(row["stage_shares"]["shares"]) == pytest.approx(1)
    assert any(
        "begin at stem, head, and the stages have 29%, 71% of the time" in str(row.get("text")) for row in rows
    ) == (has_probe)


@pytest.mark.long
def test_all_processes_end_where_the_first_can_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: Probe
) -> None:
    write_small(tmp_path)
    env = {"PACELINE_CACHE": keep(tmp_path / "cache", third, monkeypatch)}
    for status, line in train(tmp_path, *[(env, ("on.memory=100 MiB",))] * 2):
        assert status == 2
        assert (
            "on.micro_batch=2 is the least that fits the recipe, and a step would take 683.0 MiB of 100.0 MiB" in line
        )
        assert line.count("\n") == 1


def test_a_probe_is_taken_in_a_process_that_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    plan, machine = make_plan(), this_machine()
    monkeypatch.setenv("RANK", "1")  # of a launcher, with which the probe has nothing to do
    monkeypatch.setenv("WORLD_SIZE", "2")
    probe = probe_apart(plan, machine)
    assert probe is not None
    assert [block.name for block in probe.blocks] == list(plan.network.blocks)
    assert stored_probe(plan, machine) == probe
    assert capsys.readouterr().err.startswith("measuring what small steps take of")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert probe_apart(plan, machine) is None
    assert "could not be measured" in capsys.readouterr().err


RESNET50 = ("model=resnet50", "data.side=224", "global_batch=1024", "norm_batch=32")


def job_on_cuda(*words: str, **placed: Any) -> Job:
    asked = Placement.model_validate({"device": "cuda", "kernels": "plain", **placed})
    return plan_job("test", make_recipe(*words), asked, None, Tree(), Tree())


@pytest.mark.parametrize(
    ("words", "placed", "trains", "probes"),
    [
        (RESNET50, {}, True, True),
        (RESNET50, {}, False, False),
        (RESNET50, {"micro_batch": 64}, True, False),
        (RESNET50, {"micro_batch": 64, "recompute": AUTO}, True, True),
        (RESNET50, {"device": "cpu"}, True, False),
        ((), {}, True, False),  # it fits, whatever it takes
    ],
)
def test_a_run_on_cuda_is_probed_first_where_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: Probe, words: tuple[str, ...], placed: dict[str, Any],
    trains: bool, probes: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    taken: list[Plan] = []

    def take(plan: Plan, _machine: Machine) -> Probe:
        taken.append(plan)
        blocks = tuple(replace(third.blocks[0], name=name) for name in plan.network.blocks)
        return replace(third, blocks=blocks)

    monkeypatch.setattr(settling, "probe_apart", take)
    job = settled(job_on_cuda(*words, **placed), tmp_path if trains else None)
    assert len(taken) == probes
    if probes and "micro_batch" not in placed:
        assert job.plan.chosen_by.startswith("a probe of")
        assert job.plan.micro_batch == 32  # 16 GiB, less a tenth, at a third of a GiB each
    assert job.asked.micro_batch == placed.get("micro_batch", "auto")


def job_of(**placed: Any) -> Job:
    placement = Placement.model_validate({"device": "cpu", "data_on_device": False, **placed})
    return plan_job("test", make_recipe(), placement, None, Tree(), Tree())


def test_what_ran_out_is_left_behind_whatever_is_computed_again(
    tmp_path: Path, small_probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Line(0.0, 2**30 / 3 / len(small_probe.blocks))
    blocks = tuple(replace(block, kept=kept, passed=Line(0.0, 2**20)) for block in small_probe.blocks)
    whole, nothing = Line(0.0, 2**30 / 3), Line(0.0, 0.0)
    probe = replace(
        small_probe, first=whole, following=whole, held=nothing, evaluation=nothing, blocks=blocks, available=2**37
    )
    keep(tmp_path / "cache", probe, monkeypatch)
    sizes = list[int]()
    while not sizes or sizes[-1] > 4:  # the smallest with whole norm groups
        plan = settled(job_of(recompute="auto", memory=2**32), tmp_path).plan
        remember(tmp_path, plan)
        sizes.append(plan.micro_batch)
    assert sizes == sorted(set(sizes), reverse=True)
    with pytest.raises(PlanError, match="no smaller one fits"):
        settled(job_of(recompute="auto", memory=2**32), tmp_path)


def test_what_ran_out_where_there_was_less_memory_is_left_behind_by_all(tmp_path: Path) -> None:
    remember(tmp_path, job_of(memory=2**31, micro_batch=16).plan)
    decision = settling._decide(job_of(memory=2**32, micro_batch=16), 2**31, tmp_path)
    assert (decision["micro_batch"], decision["ran_out"]) == (8, 16)


def test_others_wait_for_what_the_first_process_takes_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each process has these of its own; both stores must stay, because the first one serves the other.
    stores, decided, opens = list[object](), dict[int, int](), rendezvous._open_store
    monkeypatch.setattr(rendezvous, "_decisions", itertools.repeat(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = Launch(0, 2, 0, 2, "127.0.0.1", free.getsockname()[1], store_is_there=False)

    def opened(*arguments: Any) -> Any:
        stores.append(opens(*arguments))
        return stores[-1]

    monkeypatch.setattr(rendezvous, "_open_store", opened)

    def slowly(brought: list[int]) -> int:
        time.sleep(2)
        return min(brought)

    def decide(rank: int) -> None:
        launch = replace(first, rank=rank)
        decided[rank] = rendezvous.decided_by_first(launch, 1, 5 + rank, slowly, patience=30)

    in_threads(2, decide)
    assert decided == {0: 5, 1: 5}
