"""Which cores a replica is bound to, on machines that are written down here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import pytest
from processes import write_small

from conftest import make_recipe, run_in
from paceline.binding import bound, bound_cores, cores_of, device_node, numa_nodes
from paceline.errors import PlanError
from paceline.facts import NetworkFacts
from paceline.launch import Launch
from paceline.machine import Machine
from paceline.reconcile import make_plan
from paceline.record import rows_of
from paceline.settings.placement import Placement, shared_keys

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds processes")
ALL = set(range(16))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each, and a device beside each node."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        device = tmp_path / f"bus/pci/devices/0000:{node + 1}a:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for core in ALL:
        topology = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


def shares(count: int, allowed: set[int], system: Path) -> list[set[int]]:
    return [cores_of(rank, count, allowed, system=system) for rank in range(count)]


def test_replicas_share_the_cores_by_nodes_and_whole_cores(system: Path) -> None:
    assert shares(2, ALL, system) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert shares(4, ALL, system) == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert shares(1, ALL, system) == [ALL]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("allowed", [ALL, {1, 2, 9, 12}, {3}])
def test_every_core_has_one_replica_and_none_is_taken_that_was_not_given(
    system: Path, count: int, allowed: set[int]
) -> None:
    found = shares(count, allowed, system)
    assert set().union(*found) == allowed
    if count <= len(allowed):
        assert sum(map(len, found)) == len(allowed)
    assert all(found)


def test_a_replica_is_near_its_device_within_what_it_was_given(system: Path) -> None:
    node = device_node("0000:2a:00.0", system)
    assert node == 1
    assert cores_of(0, 8, ALL, node, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_of(0, 8, {1, 4, 5}, node, system) == {4, 5}
    assert cores_of(0, 1, {1, 2}, node, system) == {1, 2}  # nothing of its node is ours


def test_a_device_without_a_node_and_a_system_that_says_nothing_are_no_fault(system: Path, tmp_path: Path) -> None:
    (system / "bus/pci/devices/0000:1a:00.0/numa_node").write_text("-1\n")
    assert device_node("0000:1a:00.0", system) is None
    assert device_node("0000:ff:00.0", system) is None
    assert device_node(None, system) is None
    nothing = tmp_path / "nothing"
    assert numa_nodes(nothing) == {}
    assert shares(2, {0, 1, 2, 3}, nothing) == [{0, 1}, {2, 3}]


@linux
def test_a_process_is_bound_for_a_while_and_then_as_before() -> None:
    before, text = os.sched_getaffinity(0), bound_cores()
    launch = Launch(1, 2, 1, 2, "", 0, store_is_there=False)
    with bound(True, launch):
        inside = os.sched_getaffinity(0)
        assert inside <= before
        assert len(inside) == max(1, len(before) - len(before) // 2)
        assert len(before) == 1 or bound_cores() != text
    assert os.sched_getaffinity(0) == before
    with bound(False, launch), bound(True, None):
        assert os.sched_getaffinity(0) == before


def decided(asked: bool | Literal["auto"], launch: Launch | None = None, **machine: int | bool) -> bool:
    here = Machine(cores=8, memory=8 << 30, **machine)  # type: ignore[arg-type]
    network = NetworkFacts(1000, 1000)
    return make_plan(make_recipe(), Placement(device="cpu", bind=asked), here, network, launch).placement.bind


@linux
def test_auto_binds_several_replicas_of_a_host_with_several_nodes_that_nobody_has_bound() -> None:
    two, one = Launch(0, 2, 0, 2, "", 0, False), Launch(0, 2, 0, 1, "", 0, False)
    assert decided("auto", two, numa_nodes=2)
    assert not decided("auto", two, numa_nodes=1)
    assert decided(True, two, numa_nodes=1)
    assert not decided(True, two, numa_nodes=2, bound=True)
    assert not decided(True, one, numa_nodes=2)
    assert not decided(True, numa_nodes=2)
    assert not decided(False, two, numa_nodes=2)
    assert "bind" not in shared_keys()


def test_elsewhere_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not decided("auto", Launch(0, 2, 0, 2, "", 0, False), numa_nodes=2)
    with pytest.raises(PlanError, match=r"on.bind=true binds processes to cores, which needs Linux; leave it out"):
        decided(True)


@linux
@pytest.mark.long
def test_the_record_says_which_cores_each_replica_was_bound_to(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2 or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        pytest.skip("this process may not use several cores, or was bound itself")
    words = ["train", write_small(tmp_path), "--replicas", "2", "on.micro_batch=4", "on.bind=true", "--out", "run"]
    done = run_in(tmp_path, *words, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    start = rows_of(tmp_path / "run")[0]
    assert start["placement"]["bind"] is True
    first, second = start["cores"]
    assert first != second
