"""What the mpiexec of Open MPI or MPICH starts is one run, the same as that of a single process."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import newest_step, write_small
from safetensors.torch import load

from conftest import Paceline, environment
from paceline import checkpoint
from paceline.record import latest, rows_of
from paceline.training.trials import Outcome, compare_outcomes

LAUNCHERS = {"mpiexec": "openmpi-bin", "mpiexec.hydra": "mpich"}
"""Each mpiexec, Open MPI's first, and the package of Debian that holds it."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FEW_CORES = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def outcome(run: Path) -> Outcome:
    """What a run leaves: its losses, and every tensor of its last checkpoint."""
    files = checkpoint.read(run / "checkpoints" / checkpoint.name_of(newest_step(run)))
    tensors = {
        f"{file}/{name}": tensor
        for file, content in files.items()
        if file.endswith(".safetensors")
        for name, tensor in load(content).items()
    }
    return Outcome([row["loss"] for row in latest(rows_of(run), "report")], tensors)


@pytest.mark.long
@pytest.mark.parametrize("mpiexec", LAUNCHERS)
def test_what_mpiexec_starts_is_the_run_of_one_process(tmp_path: Path, paceline: Paceline, mpiexec: str) -> None:
    if shutil.which(mpiexec) is None:
        pytest.skip(f"there is no {mpiexec} here; Debian has it in {LAUNCHERS[mpiexec]}")
    words = ["train", write_small(tmp_path), "--device", "cpu", "on.cpu_threads=1", "on.precision=fp64", "--out"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(free.getsockname()[1])}
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-m", "paceline", *words, "mpi", "on.micro_batch=4"],
        cwd=tmp_path, timeout=300, check=False, capture_output=True, text=True,
        env=environment() | AS_ROOT | FEW_CORES | meeting,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "mpi")[0]["placement"]["replicas"] == 2
    assert paceline(*words, "one", "on.micro_batch=16").returncode == 0
    found = compare_outcomes(outcome(tmp_path / "one"), outcome(tmp_path / "mpi"))
    assert max(found.values()) <= 1e-12, found
