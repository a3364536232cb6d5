"""What stages a plan allows, and how blocks are shared between them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from conftest import make_plan
from paceline.errors import PlanError
from paceline.launch import Launch
from paceline.machine import Machine
from paceline.model.cost import parts_of
from paceline.planning import Plan
from paceline.reconcile import make_plan as reconcile
from paceline.settings.placement import Placement
from paceline.stages import balanced, idle_share, parted, shares_of_stages, stage_numbers

BLOCKS = ("stem", "stage1/unit1", "stage2/unit1", "stage3/unit1", "head")


def launched(count: int) -> Launch:
    return Launch(0, count, 0, count, "127.0.0.1", 1, store_is_there=False)


def replan(plan: Plan, count: int, **placed: Any) -> Plan:
    """The plan as a launcher of so many processes would have it."""
    placement = Placement.model_validate({"device": "cpu", **placed})
    return reconcile(plan.recipe, placement, Machine(cores=2, memory=1 << 30), plan.network, launched(count))


def test_a_split_names_the_block_that_begins_a_stage_and_a_stage_of_blocks_means_its_first() -> None:
    plan = make_plan("on.stages=3", "on.splits=[head, stage2]", "on.micro_batch=4")
    assert plan.splits == ["stage2/unit1", "head"]
    assert parted(BLOCKS, plan.splits) == [list(BLOCKS[:2]), list(BLOCKS[2:4]), ["head"]]


def test_virtual_stages_cut_the_network_into_more_parts_than_there_are_processes() -> None:
    plan = make_plan("on.stages=2", "on.virtual_stages=2", "on.splits=[stage1, stage2, head]", "on.micro_batch=4")
    assert (plan.processes, plan.parts, plan.splits) == (2, 4, ["stage1/unit1", "stage2/unit1", "head"])
    assert stage_numbers(plan)["virtual stages begin at"] == "stage1/unit1, stage2/unit1, head"
    assert make_plan("on.virtual_stages=2").parts == 1  # a network in one piece has none


def test_processes_are_replicas_times_stages() -> None:
    plan = make_plan("on.stages=2", "on.replicas=3", "on.micro_batch=4")
    assert (plan.processes, plan.replicas, plan.splits) == (6, 3, [])
    assert replan(plan, 4, stages=2, micro_batch=4).replicas == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("on.stages=2", "on.splits=[stage2, stage3]"), "on.splits names 2 .* write on.stages=3, or name 1"),
        (("on.splits=stage2",), "on.splits names 1 .* write on.stages=2, or name none"),
        (("on.stages=2", "on.splits=stage9"), "on.splits: the network has no block 'stage9'; it has stem, "),
        (("on.stages=2", "on.splits=stem"), "the first one begins at 'stem' by itself; choose 1 of stage1/unit1, "),
        (("on.stages=3", "on.splits=[stage2, stage2/unit1]"), "each names the first block of another stage"),
        (("on.stages=6",), "on.stages=6, and the network has 5 blocks"),
        (("on.stages=2", "on.virtual_stages=2", "on.splits=stage2"), "virtual stages 2, 3 .* times .*; name 3"),
        (("on.stages=2", "on.virtual_stages=3"), "on.stages=2 times on.virtual_stages=3, and the network has 5 blocks"),
        (
            ("on.stages=2", "on.virtual_stages=2", "on.pipeline=interleaved", "global_batch=12"),
            "in rounds of 2, and there are 3 in a step; write on.pipeline=grouped, or another on.micro_batch than 4",
        ),
        (
            ("on.stages=2", "on.virtual_stages=2", "on.replicas=2", "on.pipeline=interleaved", "global_batch=20"),
            "in rounds of 2, and there are 2 or 3 in a step",
        ),
        (("on.stages=2", "on.compile=true"), "on.compile=true fuses a whole network"),
        (("on.stages=2", "on.pipeline=interleaved", "on.micro_batch=16"), "as many micro-batches .* 2, and .* 1;"),
        (("on.stages=2", "on.splits=head", "freeze=head"), "stage 2 of 2 has only blocks that freeze names .head.;"),
        (("on.stages=2", "freeze=[stem, stage1, stage2, stage3]"), "on.stages=2, and freeze leaves 1 block to train;"),
        (("on.stages=2", "model=timm:resnet18"), "a network of another package is one block"),
        (("on.stages=2", "on.graphs=true", "on.device=cuda"), "2 processes exchange gradients in it"),
    ],
    ids=str,
)  # fmt: skip
def test_what_stages_cannot_be_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make_plan("on.micro_batch=4", *words)


def test_a_launcher_must_start_a_process_for_each_stage() -> None:
    with pytest.raises(PlanError, match=r"3 processes, and on.replicas is 1 of 2 stages each; start 2"):
        replan(make_plan(), 3, stages=2)


def test_the_automatic_micro_batch_leaves_a_pipeline_enough_of_them() -> None:
    whole, staged = (make_plan("global_batch=64", "norm_batch=4", f"on.stages={stages}") for stages in (1, 4))
    assert staged.micro_batches > whole.micro_batches


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_stage_with_most_work_has_as_little_as_any_cut_allows(stages: int) -> None:
    names, costs = "abcdefg", [5, 1, 0, 7, 2, 2, 4]

    def most(splits: Any) -> int:
        return max(sum(costs[names.index(name)] for name in blocks) for blocks in parted(names, splits))

    chosen = balanced(names, costs, stages)
    assert len(chosen) == stages - 1
    assert most(chosen) == min(map(most, itertools.combinations(names[1:], stages - 1)))


def test_of_cuts_whose_parts_all_fit_the_best_balanced_one_is_taken() -> None:
    names, costs = "abcdefg", [5, 1, 0, 7, 2, 2, 4]
    assert balanced(names, costs, 2) == ["e"]
    assert balanced(names, costs, 2, lambda begin, end, part: part == 0 or end - begin >= 4) == ["c"]
    assert balanced(names, costs, 2, lambda begin, end, part: False) == ["e"]  # none fits anyway


def test_no_part_has_only_frozen_blocks_if_that_can_be_whatever_else_fits() -> None:
    names, costs = "abcdefg", [5, 1, 0, 7, 2, 2, 4]
    assert balanced(names, costs, 2, frozen="abcde") == ["g"]
    assert balanced(names, costs, 4, frozen="abc") == ["e", "f", "g"]
    assert balanced(names, costs, 2, frozen="abd") == ["e"]  # as without: of both parts some train
    assert balanced(names, costs, 2, lambda begin, end, part: end != 6, "abcde") == ["g"]
    assert balanced(names, costs, 2, lambda begin, end, part: end < 6 or begin == 5, "abcde") == ["g"]
    assert balanced(names, costs, 2, frozen="abcdef") == ["e"]  # one of them has nothing to train anyway


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ("freeze=[stem, stage1/unit1]", ("on.stages=2",)),
        ("freeze=[stem, stage1, stage2]", ("on.stages=2",)),
        ("freeze=[stage2, stage3, head]", ("on.stages=2",)),
        ("freeze=[stem]", ("on.stages=2", "on.virtual_stages=2")),
        ("freeze=[stem, stage2]", ("on.stages=3",)),
    ],
    ids=str,
)
def test_the_stages_of_a_plan_all_have_something_to_train(frozen: str, words: tuple[str, ...]) -> None:
    plan = make_plan(frozen, *words, "on.micro_batch=4")
    parts = parts_of(plan)
    assert len(parts) == plan.parts
    starts = ", ".join(blocks[0] for blocks in parts[1:])
    assert make_plan(frozen, *words, f"on.splits=[{starts}]", "on.micro_batch=4").splits  # and so is not refused


def test_the_shares_of_stages_are_those_of_all_their_parts() -> None:
    costs = {"a": 1, "b": 2, "c": 3, "d": 4}
    assert shares_of_stages(costs, [["a"], ["b"], ["c", "d"]], 3) == [0.1, 0.2, 0.7]
    assert shares_of_stages(costs, [["a"], ["b"], ["c"], ["d"]], 2) == [0.4, 0.6]


@pytest.mark.parametrize(
    ("order", "virtual", "share"),
    [("grouped", 1, 1 / 5), ("interleaved", 1, 1 / 5), ("interleaved", 2, 1 / 9), ("sequential", 2, 1 / 2)],
)
def test_the_idle_share_of_a_pipeline_follows_from_its_micro_batches(order: str, virtual: int, share: float) -> None:
    plan = make_plan("on.stages=2", "on.micro_batch=4", f"on.pipeline={order}", f"on.virtual_stages={virtual}")
    assert idle_share(plan) == pytest.approx(share)
