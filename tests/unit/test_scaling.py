"""The time of a step on many devices follows from work, bytes and links, and is held against published scaling."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from conftest import make_plan, make_recipe
from paceline.facts import DataFacts
from paceline.model import tables
from paceline.model.cost import exchanged
from paceline.model.norm_tables import NORMS
from paceline.scaling import Cluster, Link, bucket_sizes, exposed, step_time, traffic

ROOT = Path(__file__).parents[2]
QUICK = ("resnet20", "resnet50", "vgg11", "vgg11-bn", "efficientnet-cifar", "mobilenet-v2", "googlenet")
MEMBERS = [
    pytest.param(member, id=member.name, marks=[] if member.name in QUICK else [pytest.mark.long])
    for member in tables.MEMBERS
]
BUCKET = 25 << 20
CLUSTER = Cluster(4, Link(100.0, 0.5), Link(10.0, 2.0))


@pytest.mark.parametrize("member", MEMBERS)
def test_the_tables_know_the_norms_that_are_built(member: tables.Member) -> None:
    facts = DataFacts(1, 1, member.classes, member.side)
    assert exchanged(make_recipe(f"model={member.name}"), facts, []) == (member.parameters, *NORMS[member.name])


def test_frozen_blocks_exchange_nothing() -> None:
    facts = DataFacts(1, 1, 10, 32)
    whole, part = (exchanged(make_recipe("model=resnet8"), facts, frozen) for frozen in ([], ["stem", "stage1/unit1"]))
    assert part[0] == whole[0] - (3 * 16 * 9 + 2 * 16) - 2 * (16 * 16 * 9 + 2 * 16)
    assert (part[1], part[2]) == (whole[1] - 3, whole[2] - 3 * 16)


def test_one_device_exchanges_nothing() -> None:
    assert CLUSTER.all_reduce(1, 1e9) == 0


def test_a_ring_in_one_host_sends_all_but_its_own_part_twice() -> None:
    assert CLUSTER.all_reduce(4, 1000) == pytest.approx(2 * 3 * (1000 / 4 / 100 + 0.5))


def test_hosts_add_a_ring_of_their_own() -> None:
    inside = CLUSTER.all_reduce(4, 1000)
    assert CLUSTER.all_reduce(12, 1000) == pytest.approx(inside + 2 * 2 * (1000 / 3 / 10 + 2.0))


def test_a_gather_receives_what_all_others_have() -> None:
    assert Cluster(8, Link(100.0), Link(1.0)).all_gather(5, 40) == pytest.approx(4 * 40 / 100)


def test_buckets_hold_all_gradients() -> None:
    assert bucket_sizes(2 * BUCKET + 7, BUCKET) == [BUCKET, BUCKET, 7]
    assert bucket_sizes(2 * BUCKET, BUCKET) == [BUCKET, BUCKET]


def test_a_long_backward_pass_hides_all_buckets_but_the_last() -> None:
    assert exposed([(10, 1.0), (10, 1.0), (5, 0.5)], backward=100.0) == pytest.approx(0.5)


def test_buckets_wait_for_each_other_on_a_slow_link() -> None:
    assert exposed([(10, 3.0), (10, 3.0)], backward=4.0) == pytest.approx(2.0 + 3.0 + 3.0 - 4.0)
    assert exposed([(10, 3.0), (10, 3.0)], backward=0.0) == 6.0


def test_a_step_exchanges_gradients_statistics_and_the_vectors_of_shared_norms() -> None:
    plan = make_plan("on.replicas=8", "on.micro_batch=2")  # a norm group of 4 images spans 2 replicas
    sent = traffic(plan, 1_000, norms=7, channels=240)
    assert (sent.gradients, sent.statistics, sent.vectors) == (4_000, 2 * 4 * 240 + 8, 2 * 4 * 240)
    time = step_time(plan, 0.25, sent, CLUSTER)
    assert time.work == 2 * 0.25
    each = 2 * 4 * 240 / 7
    assert time.norms == pytest.approx(7 * (CLUSTER.all_gather(2, each) + CLUSTER.all_reduce(2, each)))
    assert time.total == time.work + time.exposed + time.norms
    assert 0 < time.exposed <= time.exchange


def test_float64_gradients_are_twice_as_many_bytes_and_group_norm_shares_nothing() -> None:
    assert traffic(make_plan("on.precision=fp64"), 1_000, 7, 240).gradients == 8_000
    assert traffic(make_plan("on.communication=bf16"), 1_000, 7, 240).gradients == 2_000
    alone = traffic(make_plan("norm={name: group, groups: 4}", "norm_batch=null"), 1_000, 7, 240)
    assert (alone.norms, alone.vectors, alone.statistics) == (0, 0, 8)


def fit_scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_scaling", ROOT / "benchmarks/fit_scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["fit_scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_fit_and_its_errors() -> None:
    report = fit_scaling().report()
    page = (ROOT / "docs/scaling.md").read_text()
    for row in report["rows"]:
        numbers = f"{row['published']:,} | {row['predicted']:,} | {row['error']} | {row['part']}"
        assert f"| {row['network']} | {row['system']} | {row['devices']} | {numbers} |" in page
    speeds = report["inside_gigabytes_per_second"], report["between_gigabytes_per_second"]
    assert "{} GB/s and {} GB/s".format(*speeds) in page


def test_the_fit_goes_through_the_figures_that_it_has_seen() -> None:
    assert {row["error"] for row in fit_scaling().report()["rows"] if row["part"] == "fitted"} == {"+0.0%"}
