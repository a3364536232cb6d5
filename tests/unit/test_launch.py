"""What a launcher says, and what a machine has, found without torch."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline import machine
from paceline.errors import PlanError
from paceline.launch import Launch, first_host, launched


def test_a_process_that_a_person_started_was_not_launched() -> None:
    assert launched({}) is None
    assert launched({"RANK": "0"}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_batch_script_with_several_tasks_is_one_process() -> None:
    """sbatch sets these for the script itself; only srun's steps are several processes."""
    batch = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu1"}
    assert launched(batch) is None


def test_torchrun_s_variables_are_read() -> None:
    found = launched(
        {
            "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu3",
            "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0",
        }
    )  # fmt: skip
    assert found == Launch(5, 8, 1, 4, "gpu3", 1234, store_is_there=True, attempt="2")


def test_a_bare_rank_and_world_size_are_one_host() -> None:
    found = launched({"RANK": "1", "WORLD_SIZE": "2"})
    assert found == Launch(1, 2, 0, 2, "127.0.0.1", 29500, store_is_there=False, attempt="0")


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "6",
}
HYDRA = {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "7"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[1-2]"}
"""What mpiexec's own daemon was told by the srun that started it, and hands on."""


@pytest.mark.parametrize("mpi", [OPEN_MPI, HYDRA, OPEN_MPI | DAEMON, HYDRA | DAEMON])
def test_the_variables_of_mpiexec_are_read(mpi: dict[str, str]) -> None:
    assert launched(mpi | {"MASTER_ADDR": "gpu1"}) == Launch(6, 8, 2, 4, "gpu1", 29500, store_is_there=False)
    with pytest.raises(PlanError, match=r"started 8 processes, 4 of them on this host, .* set MASTER_ADDR"):
        launched(mpi)


def test_processes_of_mpiexec_on_one_host_meet_there() -> None:
    one_host = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_PORT": "4321"}
    assert launched(OPEN_MPI | one_host) == Launch(6, 8, 2, 8, "127.0.0.1", 4321, store_is_there=False)
    assert launched(HYDRA | {"MPI_LOCALNRANKS": "8"}) == Launch(6, 8, 2, 8, "127.0.0.1", 29500, store_is_there=False)


def test_one_process_alone_is_no_launch_whoever_started_it() -> None:
    assert launched(OPEN_MPI | dict.fromkeys(OPEN_MPI, "1")) is None
    assert launched(HYDRA | dict.fromkeys(HYDRA, "1")) is None
    assert launched({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}) is None


@pytest.mark.parametrize(
    "told",
    [{"PMIX_RANK": "0"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"RANK": "3"}, {"WORLD_SIZE": "2"}],
)
def test_one_of_several_that_cannot_find_the_others_does_not_train_alone(told: dict[str, str]) -> None:
    with pytest.raises(PlanError, match=r"a launcher started this process.* to train alone, unset"):
        launched(told)


def test_a_bare_rank_on_several_hosts_needs_a_place_to_meet() -> None:
    with pytest.raises(PlanError, match="set MASTER_ADDR to the name of the host of process 0"):
        launched({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_a_place_that_is_no_number_is_told() -> None:
    with pytest.raises(PlanError, match="the environment variable WORLD_SIZE is 'many', and should be a number"):
        launched({"RANK": "0", "WORLD_SIZE": "many"})


SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_NODELIST": "gpu[003-007,9],login1",
    "SLURM_JOB_ID": "123456",
}


def test_slurm_s_variables_are_read() -> None:
    assert launched(SLURM) == Launch(6, 8, 2, 4, "gpu003", 20_000 + 123456 % 20_000, store_is_there=False)


def test_slurm_s_rendezvous_can_be_set_and_restarts_are_told_apart() -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321", "SLURM_RESTART_COUNT": "3"}
    found = launched(SLURM | given)
    assert found is not None
    assert (found.address, found.port, found.attempt) == ("10.0.0.1", 4321, "3")


@pytest.mark.parametrize(("written", "count"), [("4(x2)", 4), ("3,2(x2)", 3), ("2", 2), ("16(x4),8", 16)])
def test_slurm_s_tasks_per_node_are_those_of_the_first_node(written: str, count: int) -> None:
    found = launched(SLURM | {"SLURM_STEP_TASKS_PER_NODE": written})
    assert found is not None
    assert found.local_count == count


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("login1,gpu[003-007]", "login1"),
        ("node7", "node7"),
        ("a-b[12]", "a-b12"),
        ("gpu[1,5-6]-ib0,gpu9", "gpu1-ib0"),
        ("n1.example.org,n2.example.org", "n1.example.org"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_no_list_of_hosts_is_told_what_to_set() -> None:
    with pytest.raises(PlanError, match="set MASTER_ADDR to the first host's name"):
        first_host("")


ROWS = "0, NVIDIA X, 81559, GPU-aaa\n1, NVIDIA X, 40000, GPU-bbb\n2, NVIDIA X, 81559, GPU-abc\n"


@pytest.fixture
def three_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout=ROWS, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "count", "memory"),
    [
        (None, 3, 40000),
        ("0,2", 2, 81559),
        ("1", 1, 40000),
        ("GPU-bbb, GPU-abc", 2, 40000),
        ("", 0, 0),
        ("-1", 0, 0),
    ],
)
def test_accelerators_are_those_that_are_visible(
    visible: str | None, count: int, memory: int, three_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.this_machine()
    assert found.accelerators == count
    assert found.accelerator_memory == memory << 20
    assert found.accelerator == ("NVIDIA X" if count else "")
    assert found.cores >= 1
    assert found.memory > 1 << 20


@pytest.mark.parametrize("fault", ["missing", "fails", "hangs", "odd"])
def test_a_machine_without_a_working_driver_has_no_accelerators(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
        if fault == "hangs":
            raise subprocess.TimeoutExpired("nvidia-smi", 20)
        return subprocess.CompletedProcess(
            [], 9 if fault == "fails" else 0, stdout="No devices were found\n", stderr=""
        )

    monkeypatch.setattr(shutil, "which", lambda name: None if fault == "missing" else f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert machine.this_machine().accelerators == 0


def test_the_load_of_accelerators_is_what_their_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "0, 97, 46080, 143771\n1, [N/A], 0, 143771\n2, 5, [N/A], [N/A]\nUnable to determine\n"
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout=lines, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: answer)
    assert machine.accelerator_loads() == [
        machine.AcceleratorLoad(0, 97, 45 << 30, 143771 << 20),
        machine.AcceleratorLoad(1, None, 0, 143771 << 20),
    ]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.accelerator_loads() == []


@pytest.mark.parametrize(("limit", "expected"), [("1073741824", 1 << 30), ("max", None), ("99999999999999999", None)])
def test_the_memory_of_a_container_is_its_limit(
    limit: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    read = Path.read_text

    def limited(path: Path, *words: Any, **options: Any) -> str:
        return f"{limit}\n" if path.name == "memory.max" else read(path, *words, **options)

    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", limited)
    assert machine.this_machine().memory == (expected or total)


def test_launching_leaves_this_process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.elastic import start_replicas

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tell.py").write_text("import os, pathlib, sys\npathlib.Path(sys.argv[1] + os.environ['RANK']).touch()")
    environment, level = dict(os.environ), logging.root.manager.disable
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert start_replicas(2, ["tell", str(tmp_path / "came")]) == 0
    assert {path.name for path in tmp_path.glob("came*")} == {"came0", "came1"}
    assert dict(os.environ) == environment
    assert logging.root.manager.disable == level
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
