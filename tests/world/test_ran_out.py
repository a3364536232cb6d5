"""Memory that does not suffice: the run goes on with a smaller micro-batch, says so once, and is the same run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fingerprint, newest_step, write_small
from safetensors.torch import load

from conftest import environment, make_plan, run_in
from paceline import checkpoint
from paceline.errors import Broken
from paceline.job import stored_job
from paceline.ran_out import RAN_OUT, least_too_large, next_smaller, remember, remembered
from paceline.record import Row, rows_of
from paceline.settling import settled
from paceline.training.differences import relative_difference

INJECTION = """
import builtins, os, sys

LARGEST, STEP, RANK = int(os.environ["LARGEST"]), int(os.environ["STEP"]), os.environ["WHO"]
imported = builtins.__import__


def inject(*arguments, **options):
    module = imported(*arguments, **options)
    step = sys.modules.get("paceline.training.step")
    if hasattr(step, "end_step") and builtins.__import__ is inject:
        builtins.__import__ = imported
        import torch

        device_step = step.device_step

        def failing(session, *arguments):
            me = os.environ.get("RANK", "0") in RANK
            if me and session.plan.micro_batch > LARGEST and session.state.step >= STEP:
                raise torch.OutOfMemoryError("injected")
            return device_step(session, *arguments)

        step.device_step = failing
    return module


builtins.__import__ = inject
"""
WORDS = ("--device", "cpu", "on.cpu_threads=1", "on.precision=fp64", "on.save=1 step", "on.keep_last=9")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node")
COMMAND = ("-m", "paceline")


def run(
    folder: Path, *words: str, largest: int = 99, step: int = 0, who: str = "0", command: tuple[str, ...] = COMMAND
) -> subprocess.CompletedProcess[str]:
    """A command in whose steps memory runs out above a micro-batch, from a step on, in processes of these ranks."""
    (folder / "sitecustomize.py").write_text(INJECTION)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = environment() | {"LARGEST": str(largest), "STEP": str(step), "WHO": who, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train(folder: Path, name: str, *words: str, **injected: object) -> Path:
    """Train to the end; gives the run folder."""
    words = ("train", write_small(folder), *WORDS, "--out", name, *words)
    done = run(folder, *words, **injected) if injected else run_in(folder, *words)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    notes = [row["text"] for row in told(folder / name)]
    assert [done.stdout.count(text) for text in notes] == [1] * len(notes), done.stdout
    return folder / name


def told(run: Path) -> list[Row]:
    return [row for row in rows_of(run) if row["kind"] == "note" and "ran out of memory" in row["text"]]


def difference(one: Path, other: Path) -> float:
    """The largest relative difference of two runs' networks and optimizers at their ends."""
    worst = 0.0
    for group in ("network.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load(checkpoint.read(run / "checkpoints" / checkpoint.name_of(newest_step(run)))[group])
            for run in (one, other)
        )
        assert ours.keys() == theirs.keys()
        worst = max(worst, *(relative_difference(tensor, theirs[name]) for name, tensor in ours.items()))
    return worst


@pytest.mark.long
def test_the_command_starts_itself_again_with_the_next_smaller_micro_batch(tmp_path: Path) -> None:
    disturbed = train(tmp_path, "disturbed", "on.micro_batch=16", largest=4, step=3)
    calm = train(tmp_path, "calm", "on.micro_batch=4")
    starts = [row for row in rows_of(disturbed) if row["kind"] == "start"]
    assert [(row["step"], row["placement"]["micro_batch"]) for row in starts] == [(0, 16), (3, 8), (3, 4)]
    assert [row["micro_batch_from"] for row in starts[1:]] == [
        "less than 16, which ran out of memory", "less than 8, which ran out of memory",
    ]  # fmt: skip
    assert [row["text"].partition(",")[0] for row in told(disturbed)] == [
        "on.micro_batch=16 ran out of memory", "on.micro_batch=8 ran out of memory",
    ]  # fmt: skip
    assert rows_of(disturbed)[-1]["kind"] == "end"
    assert newest_step(disturbed) == newest_step(calm) == 6
    assert difference(disturbed, calm) < 1e-12
    assert fingerprint(disturbed) != fingerprint(calm)  # three steps were cut otherwise


def test_a_run_that_never_took_a_larger_micro_batch_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    disturbed = train(tmp_path, "disturbed", "on.micro_batch=auto", largest=8)
    assert fingerprint(disturbed) == fingerprint(train(tmp_path, "calm", "on.micro_batch=8"))
    # What did not fit is not tried again, whoever asks for it; another placement may try it.
    for words, size in (((), 8), (("on.micro_batch=16",), 8), (("on.micro_batch=4",), 4), (("on.recompute=all",), 16)):
        job = stored_job(disturbed, ["on.micro_batch=auto", "on.replicas=1", *words], None)
        assert settled(job, disturbed).plan.micro_batch == size, words
    (disturbed / RAN_OUT).write_text("[{")
    assert settled(stored_job(disturbed, [], None), disturbed).plan.micro_batch == 16


def test_memory_that_holds_no_micro_batch_at_all_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    write_small(tmp_path)
    done = run(tmp_path, "train", "small.yaml", *WORDS, "--out", "run", "norm_batch=16", largest=0)
    assert done.returncode == 1
    remedy = "no smaller one fits norm_batch and on.replicas; write on.recompute=all, or more on.replicas"
    assert done.stderr == f"error: out of memory at on.micro_batch=16; {remedy}\n"
    assert remembered(tmp_path / "run") == 0


@pytest.mark.long
def test_a_resume_starts_itself_again_too_and_a_last_one_that_fails_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "train", write_small(tmp_path), *WORDS, "--out", "run", "on.micro_batch=16", largest=0, step=2)
    assert done.returncode == 1
    assert "error: out of memory at on.micro_batch=4; no smaller one fits" in done.stderr
    assert [row["placement"]["micro_batch"] for row in rows_of(tmp_path / "run") if row["kind"] == "start"] == [
        16,
        8,
        4,
    ]
    done = run(tmp_path, "resume", "run", "on.replicas=2", "on.micro_batch=8", largest=2, who="01")
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.long
def test_local_replicas_are_started_again_by_their_parent(tmp_path: Path) -> None:
    disturbed = train(tmp_path, "run", "--replicas", "2", "on.micro_batch=8", largest=2, step=2, who="01")
    assert [row["placement"]["micro_batch"] for row in rows_of(disturbed) if row["kind"] == "start"] == [8, 4, 2]
    assert len(told(disturbed)) == 2
    calm = train(tmp_path, "calm", "--replicas", "2", "on.micro_batch=2")
    assert difference(disturbed, calm) < 1e-12


@pytest.mark.long
def test_torchrun_starts_workers_again_that_have_left_a_smaller_micro_batch(tmp_path: Path) -> None:
    words = ("train", write_small(tmp_path), *WORDS, "--out", "run", "on.micro_batch=8")
    done = run(tmp_path, *words, largest=2, step=2, who="1", command=(*TORCHRUN, "2", *COMMAND))
    assert done.returncode == 0, done.stderr
    assert [row["placement"]["micro_batch"] for row in rows_of(tmp_path / "run") if row["kind"] == "start"] == [8, 4, 2]
    assert len(told(tmp_path / "run")) == 2
    calm = train(tmp_path, "calm", "--replicas", "2", "on.micro_batch=2")
    assert difference(tmp_path / "run", calm) < 1e-12


def test_a_micro_batch_that_the_pipeline_refuses_is_not_offered() -> None:
    stages = ("on.stages=2", "on.virtual_stages=2", "on.splits=[stage1, stage2, head]", "on.pipeline=interleaved")
    plan = make_plan("global_batch=24", "norm_batch=2", *stages, "on.micro_batch=12")
    assert next_smaller(plan) == 6  # with 8 there would be an odd number of micro-batches


@pytest.mark.parametrize("entry", ['{"memory": "x", "micro_batch": 4}', '{"memory": 9}', "7", '{"micro_batch": null}'])
def test_a_damaged_memory_of_what_ran_out_is_nothing_worse_than_another_try(tmp_path: Path, entry: str) -> None:
    (tmp_path / RAN_OUT).write_text(f"[{entry}]")
    assert least_too_large(tmp_path, make_plan(), memory=1) is None


def test_one_process_does_not_try_the_same_again_for_ever(tmp_path: Path) -> None:
    remember(tmp_path, make_plan())
    with pytest.raises(Broken, match="yet it was tried again; write a smaller one"):
        remember(tmp_path, make_plan())
    two = make_plan("on.replicas=2", "on.micro_batch=8")
    remember(tmp_path, two)
    remember(tmp_path, two)  # each of them has run out
