"""One step of one replica among many, rehearsed in a single process: what it sends is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from conftest import Paceline, make_plan
from paceline.errors import PlanError
from paceline.training.rehearsal import rehearse


def sent(found: dict[str, Any], among: int, collective: str = "all_reduce", on: str = "device") -> dict[str, Any]:
    """The row of one kind of collective."""
    (row,) = [
        each
        for each in found["collectives"]
        if (each["collective"], each["among"], each["on"]) == (collective, among, on)
    ]
    return dict(row)


def parameters() -> int:
    from paceline.model.cost import count_parameters

    plan = make_plan()
    return count_parameters(plan.recipe, plan.facts)


def test_each_gradient_is_sent_once_whatever_the_number_of_replicas() -> None:
    for replicas in (2, 4):
        found = rehearse(make_plan(f"on.replicas={replicas}", "on.micro_batch=4"), replicas - 1)
        row = sent(found, replicas)
        assert (found["images"], found["forward_passes"]) == (16 // replicas, 4 // replicas)
        assert row["calls"] == 2  # a bucket, and the sums of norms, loss and hits
        assert 0 < row["bytes"] - 4 * parameters() < 10_000
        assert sent(found, replicas, on="host") == {
            "collective": "all_reduce", "among": replicas, "on": "host", "type": "int32", "calls": 1, "bytes": 12,
        }  # fmt: skip
        assert not dist.is_initialized()


def test_norm_groups_across_replicas_are_counted_by_themselves() -> None:
    found = rehearse(make_plan("on.replicas=8", "on.micro_batch=2"), 5)
    assert found["images"] == 2
    gathers = sent(found, 2, "all_gather")
    assert gathers["calls"] == sent(found, 2)["calls"] == 7  # the norms of a ResNet-8


def test_buckets_and_16_bit_communication_show_in_the_count() -> None:
    found = rehearse(make_plan("on.replicas=4", "on.micro_batch=4", "on.bucket=64 KiB", "on.communication=bf16"), 0)
    rows = {row["type"]: row for row in found["collectives"] if row["on"] == "device"}
    assert rows["bfloat16"]["bytes"] == 2 * parameters()
    assert rows["bfloat16"]["calls"] > 2
    assert rows["float32"]["calls"] == 1


def test_a_replica_without_a_micro_batch_sends_as_much() -> None:
    plan = make_plan("on.replicas=5", "on.micro_batch=4")
    idle, busy = rehearse(plan, 4), rehearse(plan, 0)
    assert (idle["images"], busy["images"]) == (0, 4)
    assert idle["collectives"] == busy["collectives"]


def test_a_replica_that_is_not_of_the_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="--rehearse 4: the plan has replicas 0 to 3; write one of them"):
        rehearse(make_plan("on.replicas=4", "on.micro_batch=4"), 4)


def test_the_command_rehearses_more_replicas_than_there_are_devices(paceline: Paceline) -> None:
    words = ["shapes/resnet8", "--device", "cpu", "--rehearse", "63"]
    done = paceline("plan", *words, "on.replicas=64", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["replica"], found["replicas"], found["images"]) == (63, 64, 2)
    assert found["peak_memory"] > 1 << 20
    assert sent(found, 64)["calls"] == 2
    refused = paceline("plan", *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--rehearse plays one of many replicas; write how many there are, as in on.replicas=256" in refused.stderr
