"""`paceline launch` prints files for schedulers: what it refuses, and what its scripts do with signals and statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import SMALL, Paceline
from folders_made import put
from paceline.errors import INTERRUPTED
from paceline.schedulers import name_of_run

PHOTOS = [f"{animal}/{number}.jpg" for animal in ("cat", "dog") for number in range(12)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "shapes/resnet8"], "write --out FOLDER, on a file system that all hosts share"),
        (["slurm", "nvidia/resnet50", "--out", "r"], "write --data FOLDER: where the images are on every host"),
        (["docker", "--out", "r"], "docker runs containers: write --image NAME"),
        (["skypilot", "--out", "r", "--image", "i"], "skypilot hosts share no folders: write --volume NAME"),
        (
            ["skypilot", "--out", "r", "--image", "i", "--volume", "v"],
            "skypilot looks for hosts by their accelerator: write --accelerator NAME, such as H100",
        ),
        (["slurm", "--out", "r", "--image", "i"], "--image has no place in what slurm reads here; leave it out"),
        (
            ["slurm", "--out", "r", "--hosts", "2", "--devices", "3", "on.replicas=4"],
            "the launcher started 6 processes, and on.replicas is 4; make them equal",
        ),
        (
            ["slurm", "--out", "r", "--hosts", "3", "norm_batch=128", "on.micro_batch=32"],
            "norm_batch 128 spans 4 replicas of on.micro_batch 32, which do not divide on.replicas 3",
        ),
        (["slum", "--out", "r"], "'slum' is not one of"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(paceline: Paceline, words: list[str], message: str) -> None:
    done = paceline("launch", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_of_photographs_is_launched_with_what_was_chosen_for_it(paceline: Paceline, tmp_path: Path) -> None:
    put(tmp_path / "photos", *PHOTOS)
    done = paceline("launch", "torchrun", "photos", "--devices", "2", "--out", "runs/mine", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "-m paceline train" in line)
    assert f"--data {tmp_path}/photos --out {tmp_path}/runs/mine &" in line
    assert " global_batch=" in line  # written out: no host chooses again


def test_a_page_and_a_placement_of_one_s_own_are_named_by_their_whole_paths(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SMALL)
    (tmp_path / "here.yaml").write_text("{device: cpu}")
    done = paceline("launch", "slurm", "mine.yaml", "--on", "here.yaml", "--out", "mine")
    assert done.returncode == 0, done.stderr
    assert f"paceline train {tmp_path}/mine.yaml --on {tmp_path}/here.yaml --out {tmp_path}/mine\n" in done.stdout
    assert "--gpus-per-node" not in done.stdout


def test_it_is_answered_without_torch(paceline: Paceline) -> None:
    program = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    done = paceline("launch", "slurm", "--out", "r", program=program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("out", "name"),
    [("runs/Mine 2", "mine-2"), ("runs/2026-01", "run-2026-01"), ("runs/ü", "run"), ("x" * 60, "x" * 40)],
)
def test_a_run_s_name_is_one_that_schedulers_take(out: str, name: str) -> None:
    assert name_of_run(Path(out)) == name


FAKE = """#!/bin/bash
cd "$(dirname "$0")"
trap 'echo "{\\"kind\\": \\"interrupted\\"}" >> ../run/record.jsonl; exit 1' TERM
if [ -e ../wait ]; then touch ../waits; while true; do sleep 0.05; done; fi
cat ../row >> ../run/record.jsonl
exit "$(cat ../status)"
"""
"""In place of torchrun: writes a row and ends, or waits for a signal."""


@pytest.fixture
def script(paceline: Paceline, tmp_path: Path) -> list[str]:
    """What starts the script of a run in this folder, whose record has an interruption of an earlier start."""
    done = paceline("launch", "torchrun", "--device", "cpu", "--out", "run")
    (tmp_path / "start.sh").write_text(done.stdout)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/torchrun").write_text(FAKE)
    (tmp_path / "bin/torchrun").chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/record.jsonl").write_text('{"kind": "interrupted"}\n')
    return ["env", f"PATH={tmp_path}/bin:{os.environ['PATH']}", "bash", str(tmp_path / "start.sh")]


@pytest.mark.parametrize(
    ("status", "row", "expected"),
    [
        (0, '{"kind": "end"}', 0),
        (1, '{"kind": "interrupted"}', INTERRUPTED),
        (1, '{"kind": "failed"}', 1),
        (1, "", 1),  # what an earlier start wrote says nothing of this one
    ],
)
def test_a_script_gives_back_the_status_that_torchrun_does_not(
    script: list[str], tmp_path: Path, status: int, row: str, expected: int
) -> None:
    (tmp_path / "status").write_text(str(status))
    (tmp_path / "row").write_text(f"{row}\n" if row else "")
    assert subprocess.run(script, check=False).returncode == expected


def test_a_script_hands_on_the_signal_to_stop_and_waits_for_the_end(script: list[str], tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    with subprocess.Popen(script) as process:
        while not (tmp_path / "waits").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == INTERRUPTED
