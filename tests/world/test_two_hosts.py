"""Two hosts on one machine, each a network of its own, with a cable between them: one goes and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pytest
from processes import fingerprint, newest_step, write_small

from conftest import environment
from paceline.record import latest, rows_of

PORT = 29500
ADDRESSES = ("10.77.0.1", "10.77.0.2")
WORDS = ["--device", "cpu", "on.cpu_threads=1", "on.micro_batch=4", "on.timeout=30", "on.save=7 steps", "--out"]


def networks_work() -> bool:
    """Whether this machine lets us make network namespaces: Linux, root, iproute2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"paceline-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux" or not networks_work(), reason="no network namespaces here"),
]


class Host:
    """A network namespace with one end of a cable, which reaches the other host and nothing else."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.network = f"paceline-{os.getpid()}-{number}"
        self.cable = f"pl{os.getpid() % 100_000}-{number}"

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start a Python module on this host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.network, sys.executable, "-m", *words],
            cwd=self.folder, env=environment() | {"GLOO_SOCKET_IFNAME": self.cable} | variables,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def plug(self, state: str) -> None:
        """Let the end of the cable be up or down."""
        ip("-n", self.network, "link", "set", self.cable, state)

    def lose(self) -> None:
        """Kill whatever runs on this host, workers in sessions of their own too."""
        listing = subprocess.run(
            ["ip", "netns", "pids", self.network], capture_output=True, text=True, check=True
        ).stdout
        for pid in map(int, listing.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that share a folder."""
    first, second = (Host(number, tmp_path) for number in (0, 1))
    with ExitStack() as stack:
        for host in (first, second):
            ip("netns", "add", host.network)
            stack.callback(ip, "netns", "del", host.network)  # and its end of the cable with it
            stack.callback(host.lose)
        ip("link", "add", first.cable, "netns", first.network, "type", "veth",
           "peer", "name", second.cable, "netns", second.network)  # fmt: skip
        for host, address in zip((first, second), ADDRESSES, strict=True):
            ip("-n", host.network, "addr", "add", f"{address}/24", "dev", host.cable)
            ip("-n", host.network, "link", "set", "lo", "up")
            host.plug("up")
        yield first, second


def ip(*words: str) -> None:
    """Run iproute2's `ip`, which must succeed."""
    subprocess.run(["ip", *words], check=True)


Start = Callable[[Host, str, Path], "subprocess.Popen[str]"]


def by_torchrun(host: Host, recipe: str, run: Path, *words: str) -> subprocess.Popen[str]:
    """What a person starts on each host."""
    meeting = ["--node-rank", str(host.number), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    return host.start(
        "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting, "-m", "paceline", "train", recipe,
        *words, *WORDS, str(run),
    )  # fmt: skip


def by_variables(host: Host, recipe: str, run: Path) -> subprocess.Popen[str]:
    """What a launcher starts on each host: one process, which is told its place."""
    place = {"RANK": str(host.number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    return host.start("paceline", "train", recipe, *WORDS, str(run), **place, **meeting)


def end(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until all processes have ended well; gives what they said of faults."""
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def wait_for(run: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    """Wait until a step is saved, while all processes live."""
    last = time.monotonic() + 240
    while newest_step(run) < step:
        assert [process.poll() for process in processes] == [None] * len(processes), processes[0].communicate()
        assert time.monotonic() < last, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize(("start", "lost"), [(by_torchrun, 0), (by_variables, 1)])
def test_a_host_that_is_lost_and_comes_back_leaves_the_undisturbed_run(
    hosts: tuple[Host, Host], tmp_path: Path, start: Start, lost: int
) -> None:
    recipe = write_small(tmp_path, epochs="20")
    whole, run = tmp_path / "whole", tmp_path / "run"
    end([start(host, recipe, whole) for host in hosts])
    processes = [start(host, recipe, run) for host in hosts]
    wait_for(run, 20, processes)
    hosts[lost].lose()
    for process in processes:
        process.communicate(timeout=300)
    assert processes[1 - lost].returncode != 0  # the other host ends by itself
    steps = newest_step(whole)
    assert 20 <= newest_step(run) < steps, "the host was lost too late to mean anything"
    end([start(host, recipe, run) for host in hosts])
    assert newest_step(run) == steps
    assert fingerprint(run) == fingerprint(whole)
    losses = [[row["loss"] for row in latest(rows_of(each), "report")] for each in (whole, run)]
    assert losses[0] == losses[1]
    starts = [row for row in rows_of(run) if row["kind"] == "start"]
    assert len(starts) == 2
    assert starts[0]["placement"]["replicas"] == (4 if start is by_torchrun else 2)


def pipeline(host: Host, recipe: str, run: Path) -> subprocess.Popen[str]:
    """The same for a replica of two stages on each host."""
    return by_torchrun(host, recipe, run, "on.stages=2")


@pytest.mark.parametrize("start", [by_variables, pipeline])
def test_a_cable_that_is_pulled_out_ends_the_run_and_once_it_is_back_the_run_goes_on(
    hosts: tuple[Host, Host], tmp_path: Path, start: Start
) -> None:
    recipe = write_small(tmp_path, epochs="20")
    whole, run = tmp_path / "whole", tmp_path / "run"
    end([start(host, recipe, whole) for host in hosts])
    steps, random = newest_step(whole), Random(os.environ.get("CHAOS_SEED"))
    for first, last in ((1, steps // 3), (steps // 3, steps // 2)):
        processes = [start(host, recipe, run) for host in hosts]
        wait_for(run, max(newest_step(run) + 1, random.randrange(first, last)), processes)
        pulled = hosts[random.randrange(2)]
        print(f"pulled out of host {pulled.number} after step {newest_step(run)}")
        pulled.plug("down")
        said = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [1, 1], said
        assert newest_step(run) < steps, "the cable was pulled out too late to mean anything"
        pulled.plug("up")
    end([start(host, recipe, run) for host in hosts])
    assert fingerprint(run) == fingerprint(whole)
    assert sum(row["kind"] == "start" for row in rows_of(run)) == 3
