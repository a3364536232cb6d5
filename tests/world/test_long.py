"""The long suites: the demo's accuracy, the full proof, compilation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fingerprint, write_small

from conftest import Paceline, environment
from paceline.record import latest, rows_of

pytestmark = pytest.mark.long


def test_the_demo_reaches_95_percent(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("train", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert latest(rows_of(tmp_path / "run"), "validation")[-1]["top1"] >= 0.95


def test_verify_passes_on_the_demo_recipe(paceline: Paceline) -> None:
    done = paceline("verify", "shapes/resnet8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["largest_difference"] <= 1e-12


def test_compilation_changes_rounding_only(paceline: Paceline, tmp_path: Path) -> None:
    words = ["train", "shapes/resnet8", "epochs=0.06", "report=1 steps", "on.precision=fp64", "on.micro_batch=64"]
    for compiled in ("false", "true"):
        done = paceline(*words, "--out", compiled, f"on.compile={compiled}")
        assert done.returncode == 0, done.stderr
    for kind in ("report", "validation"):
        plain, fused = (latest(rows_of(tmp_path / name), kind) for name in ("false", "true"))
        assert [row["loss"] for row in fused] == pytest.approx([row["loss"] for row in plain], rel=1e-9)


def test_saving_by_the_clock_saves_on_all_replicas_alike(paceline: Paceline, tmp_path: Path) -> None:
    words = ["train", "shapes/resnet8", "epochs=0.5", "--replicas", "2", "on.save=1 seconds", "on.keep_last=99"]
    done = paceline(*words, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run/checkpoints").iterdir())) >= 3


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec here; Debian's is in openmpi-bin")
def test_what_mpiexec_starts_is_one_run(tmp_path: Path, paceline: Paceline) -> None:
    words = ["train", write_small(tmp_path), "--device", "cpu", "on.cpu_threads=1", "on.precision=fp64", "--out"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    few_cores = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    done = subprocess.run(
        ["mpiexec", "-n", "2", sys.executable, "-m", "paceline", *words, "mpi"], cwd=tmp_path, timeout=300, check=False,
        env=environment() | as_root | few_cores | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert paceline(*words, "own", "--replicas", "2").returncode == 0
    assert rows_of(tmp_path / "mpi")[0]["placement"]["replicas"] == 2
    assert fingerprint(tmp_path / "mpi") == fingerprint(tmp_path / "own")
