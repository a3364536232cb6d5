"""What steps take of a device by a probe: which micro-batch is chosen, and what is computed again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from conftest import make_plan
from paceline.errors import PlanError
from paceline.facts import Line, Probe, ProbedBlock
from paceline.memory import MARGIN, at_once, best_that_fits, demand, least_cuts, room_of
from paceline.planning import Plan
from paceline.settings.placement import AUTO, Placement

MIB = 1 << 20
KEPT = (6, 4, 4, 2, 1)
"""MiB that each block of a ResNet-8 keeps of an image, here."""


def block(name: str, kept: float, seconds: float = 1.0) -> ProbedBlock:
    return ProbedBlock(name, MIB, MIB, MIB, Line(0, kept * MIB), Line(0, MIB / 4), Line(0, 0), seconds, 2 * seconds)


def probe_of(plan: Plan, **changes: Any) -> Probe:
    """A probe by which a micro-batch takes 17 MiB and 15 s for each image, a pass 2 s, and the state 10 MiB."""
    blocks = tuple(block(name, kept) for name, kept in zip(plan.network.blocks, KEPT, strict=True))
    known: dict[str, Any] = {
        "device": "D", "counted": False, "taken": 0.0, "sizes": (1, 2, 4), "available": 1 << 40,
        "first": Line(11 * MIB, 17 * MIB), "following": Line(16 * MIB, 17 * MIB), "update": Line(20 * MIB, 0),
        "held": Line(10 * MIB, 0), "evaluation": Line(0, 0), "off": 0.0, "seconds": Line(2, 15), "update_seconds": 1.0,
        "blocks": blocks,
    }  # fmt: skip
    return Probe(**known | changes)


def plan_of(*words: str, size: int = 16, memory: float = 1000) -> Plan:
    words = ("data_on_device=false", f"micro_batch={size}", f"memory={int(memory * MIB)}", *words)
    return make_plan("norm_batch=1", "global_batch=16", "data.side=8", *(f"on.{word}" for word in words))


def asked(**placed: Any) -> Placement:
    return Placement.model_validate({"micro_batch": "auto", **placed})


def test_a_step_takes_what_the_probe_says_and_its_images() -> None:
    images = 16 * 3 * 8 * 8
    one, two = demand(plan_of(size=16), probe_of(plan_of())), demand(plan_of(size=8), probe_of(plan_of()))
    assert one.step == (11 + 17 * 16) * MIB + images
    assert two.step == (16 + 17 * 8) * MIB + images  # the second micro-batch comes beside gradients
    assert (one.gradients, two.gradients) == (0, 5 * MIB)
    for needs in (one, two):
        parts = needs.weights + needs.gradients + needs.optimizer + needs.kept + needs.inputs + needs.workspace
        assert parts == needs.step == needs.peak
    assert (one.seconds, two.seconds) == (2 + 15 * 16 + 1, 2 * (2 + 15 * 8) + 1)


def test_an_update_or_a_validation_may_take_the_most() -> None:
    plan = plan_of(size=1)
    update, validation = Line(100 * MIB, 0), Line(0, 200 * MIB)
    assert demand(plan, probe_of(plan, update=update)).step == pytest.approx(100 * MIB, rel=1e-3)
    needs = demand(plan, probe_of(plan, evaluation=validation))
    assert needs.peak == needs.evaluation == pytest.approx((10 + 4 * 200) * MIB, rel=1e-3)


def test_a_validation_takes_fewer_images_at_a_time_before_training_does() -> None:
    plan = make_plan("norm_batch=1", "global_batch=16", "data.validation_images=9999", "on.data_on_device=false",
                     f"on.memory={400 * MIB}")  # fmt: skip
    probe = probe_of(plan, evaluation=Line(5 * MIB, 10 * MIB))
    assert demand(plan, probe).evaluation > room_of(plan, probe)
    best = best_that_fits(plan, asked(), probe)
    assert (best.micro_batch, best.evaluation_batch) == (16, 32)  # of 64: 345 MiB are left beside 15
    assert demand(best, probe).peak <= room_of(plan, probe)
    assert demand(replace(best, most_evaluated=40), probe).peak > room_of(plan, probe)


@pytest.mark.parametrize(("words", "more"), [((), 5), (("communication=bf16",), 7.5), (("shard=optimizer",), 2.5)])
def test_replicas_have_buckets_and_may_share_state(words: tuple[str, ...], more: float) -> None:
    alone, several = plan_of(size=1), plan_of("replicas=2", *words, size=1)
    difference = demand(several, probe_of(alone)).step - demand(alone, probe_of(alone)).step
    assert difference == pytest.approx(more * MIB, abs=0.1 * MIB)


@pytest.mark.parametrize(("memory", "chosen"), [(1000, 16), (320, 16), (310, 8), (100, 4), (50, 1)])
def test_the_largest_micro_batch_that_leaves_the_margin_is_chosen(memory: float, chosen: int) -> None:
    plan = plan_of(memory=memory)
    best = best_that_fits(plan, asked(), probe_of(plan))
    assert best.micro_batch == chosen
    assert demand(best, probe_of(plan)).peak <= room_of(plan, probe_of(plan)) == (1 - MARGIN) * int(memory * MIB)


def test_what_others_take_of_a_device_is_not_there() -> None:
    plan = plan_of(memory=1000)
    assert best_that_fits(plan, asked(), probe_of(plan, available=100 * MIB)).micro_batch == 4


def test_the_choice_keeps_the_rules_of_norm_groups_and_mixing() -> None:
    words = ("global_batch=96", "norm_batch=12", "mix.mixup=0.2", "mix.block=2")
    plan = make_plan(*words, "on.micro_batch=96", "on.data_on_device=false")
    sizes = {}
    for memory in range(40, 2000, 20):
        placed = replace(plan, placement=plan.placement.model_copy(update={"memory": memory * MIB}))
        try:
            sizes[best_that_fits(placed, asked(), probe_of(plan)).micro_batch] = memory
        except PlanError as fault:
            assert "on.micro_batch=12 is the least that fits the recipe" in str(fault)  # noqa: PT017 - of several
    assert sorted(sizes) == [12, 24, 48, 96]


def test_of_micro_batches_that_fit_the_one_with_the_shortest_step_is_chosen() -> None:
    plan = make_plan("global_batch=48", "norm_batch=1", "on.replicas=3", "on.micro_batch=16", "on.data_on_device=false")
    assert (
        best_that_fits(plan, asked(), probe_of(plan)).micro_batch == 16
    )  # 24 and 48 would leave replicas without work


def test_what_does_not_fit_at_all_is_refused_with_what_would_help() -> None:
    plan = plan_of(memory=20)
    with pytest.raises(PlanError, match=r"on.micro_batch=1 is the least .* 33.0 MiB of 20.0 MiB; write on.recompute="):
        best_that_fits(plan, asked(), probe_of(plan))
    with pytest.raises(PlanError, match=r"write more on.replicas, or a smaller norm_batch"):
        best_that_fits(plan_of(memory=5), asked(recompute=AUTO), probe_of(plan))
    assert best_that_fits(plan_of(memory=34), asked(), probe_of(plan)).micro_batch == 1  # in the margin, but it may do


def test_a_size_that_did_not_fit_is_not_chosen_again() -> None:
    plan = plan_of()
    assert best_that_fits(plan, asked(), probe_of(plan), below=16).micro_batch == 8
    assert best_that_fits(plan, asked(micro_batch=16), probe_of(plan), below=16).micro_batch == 8
    assert best_that_fits(plan_of(size=4), asked(micro_batch=4), probe_of(plan), below=16).micro_batch == 4
    with pytest.raises(PlanError, match=r"on.micro_batch=1 did not fit the memory, and no smaller one fits the recipe"):
        best_that_fits(plan, asked(), probe_of(plan), below=1)


def test_what_is_kept_at_one_time_is_counted_piece_by_piece() -> None:
    kept, working, entering = [6.0, 4, 4, 2, 1], [0.0] * 5, [0.0, 1, 1, 1, 1]
    assert at_once(kept, working, entering, []) == 17
    assert at_once(kept, working, entering, [2]) == max(6 + 4, 1 + 4 + 2 + 1)
    assert at_once(kept, working, entering, [1, 2, 3, 4]) == max(6, 1 + 4, 2 + 4, 3 + 2, 4 + 1)


def test_a_block_works_when_the_blocks_behind_it_are_done() -> None:
    kept, entering = [6.0, 4, 4, 2, 1], [0.0, 1, 1, 1, 1]
    assert at_once(kept, [20.0, 0, 0, 0, 0], entering, []) == 6 + 20
    assert at_once(kept, [0.0, 0, 9, 0, 0], entering, []) == 6 + 4 + 4 + 9
    assert at_once(kept, [0.0, 0, 9, 0, 0], entering, [2]) == 1 + 4 + 9


@pytest.mark.parametrize("working", [[0.0] * 5, [3.0, 0, 2, 0, 1]], ids=["counted", "measured"])
@pytest.mark.parametrize("room", [5.5, 6, 6.5, 7, 8, 9, 10, 11, 12, 14, 16.9, 17, 18])
def test_as_few_blocks_are_computed_again_as_any_cuts_allow(room: float, working: list[float]) -> None:
    kept, entering = [6.0, 4, 4, 2, 1], [0.0, 1, 0.5, 2, 1]
    found = least_cuts(kept, working, entering, room)
    every = [list(cuts) for count in range(5) for cuts in itertools.combinations(range(1, 5), count)]
    good = [max(cuts, default=0) for cuts in every if at_once(kept, working, entering, cuts) <= room]
    assert (found is None) == (not good)
    if found is not None:
        assert at_once(kept, working, entering, found) <= room
        assert max(found, default=0) == min(good)


def test_only_as_much_is_recomputed_as_the_memory_asks_for() -> None:
    cut: dict[int, int] = {}
    for memory in range(100, 340, 10):
        plan = plan_of(memory=memory)
        placed = best_that_fits(plan, asked(micro_batch=16, recompute=AUTO), probe_of(plan))
        assert placed.micro_batch == 16
        needs = demand(placed, probe_of(plan))
        if placed.placement.recompute != ("all",):
            assert needs.peak <= room_of(plan, probe_of(plan))
        cut[memory] = max((plan.network.blocks.index(name) for name in placed.recomputed), default=0)
    assert cut[100] == 4
    assert cut[330] == 0
    assert list(cut.values()) == sorted(cut.values(), reverse=True)
    assert len(set(cut.values())) > 3


def test_recomputing_takes_the_time_of_the_forward_passes_before_the_last_cut() -> None:
    plan = plan_of(size=8)
    for names, blocks in (("stem", 0), ("[stage2]", 2), ("[stage1, stage3]", 3), ("all", 4)):
        placed = plan_of(f"recompute={names}", size=8)
        assert demand(placed, probe_of(plan)).seconds == demand(plan, probe_of(plan)).seconds + 2 * 8 * blocks


def test_a_smaller_micro_batch_comes_before_recomputation_that_takes_longer() -> None:
    plan = plan_of(memory=200)
    placed = best_that_fits(plan, asked(recompute=AUTO), probe_of(plan))
    assert (placed.micro_batch, placed.recomputed) == (8, [])
    slow = probe_of(plan, seconds=Line(1000, 15))  # each pass costs so much more that one of them is worth it
    placed = best_that_fits(plan, asked(recompute=AUTO), slow)
    assert placed.micro_batch == 16
    assert placed.recomputed


def pipeline(*words: str, size: int = 2, memory: float = 1000) -> Plan:
    words = ("data_on_device=false", f"micro_batch={size}", f"memory={int(memory * MIB)}", *words)
    return make_plan("norm_batch=2", "global_batch=16", "data.side=8", *(f"on.{word}" for word in words))


def test_a_stage_takes_what_its_blocks_do_and_all_stages_together_no_less_than_the_whole_network() -> None:
    plan = pipeline("stages=2", "splits=[stage2]", "pipeline=sequential")
    probe = probe_of(plan)
    whole, needs = demand(pipeline(), probe), demand(plan, probe)
    assert needs.weights == 2 * MIB  # of the first stage, which keeps the most
    assert needs.kept == pytest.approx((6 + 4) * 2 * MIB + MIB / 4 * 2)  # and what it has sent
    assert needs.workspace == pytest.approx(whole.workspace, rel=0.01)
    assert needs.step < whole.step


@pytest.mark.parametrize(("order", "under_way"), [("sequential", 1), ("interleaved", 2), ("grouped", 8)])
def test_what_a_stage_keeps_follows_from_the_micro_batches_that_are_under_way(order: str, under_way: int) -> None:
    plan = pipeline("stages=2", "splits=[stage2]", f"pipeline={order}")
    one = (6 + 4 + 0.25) * 2 * MIB
    assert demand(plan, probe_of(plan)).kept == pytest.approx(under_way * one)


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        (("pipeline=grouped",), 8 + 1), (("pipeline=interleaved",), 8 + 1), (("pipeline=sequential",), 8 * 2),
        (("pipeline=interleaved", "virtual_stages=2", "splits=[stage1, stage2, stage3]"), 8 + 1 / 2),
    ],
)  # fmt: skip
def test_a_step_of_a_pipeline_takes_its_turns_of_the_slowest_stage(words: tuple[str, ...], turns: float) -> None:
    plan = pipeline("stages=2", "splits=[stage2]", *words)
    blocks = tuple(replace(one, forward=1.0, backward=1.0) for one in probe_of(plan).blocks)
    probe = probe_of(plan, blocks=(*blocks[:-1], replace(blocks[-1], forward=0.0, backward=0.0)))  # two equal stages
    assert demand(plan, probe).seconds == pytest.approx(turns * (2 + 15 * 2) / 2 + 1)


def test_stages_are_balanced_by_measured_time() -> None:
    plan = pipeline("stages=2")
    probe = probe_of(plan)
    for slow, splits in ((0, "stage1/unit1"), (4, "head")):
        blocks = [replace(one, forward=1 + 9 * (number == slow)) for number, one in enumerate(probe.blocks)]
        best = best_that_fits(plan, asked(stages=2, micro_batch=2), replace(probe, blocks=tuple(blocks)))
        assert best.splits == [splits]
    asking = asked(stages=2, micro_batch=2, splits=("stage3",))
    written = pipeline("stages=2", "splits=stage3")
    assert best_that_fits(written, asking, probe).splits == ["stage3/unit1"]


def test_stages_are_balanced_by_time_only_as_far_as_the_memory_allows() -> None:
    plan = pipeline("stages=2")
    blocks = [replace(one, forward=1 + 9 * (number == 4)) for number, one in enumerate(probe_of(plan).blocks)]
    probe = probe_of(plan, blocks=tuple(blocks))
    free = best_that_fits(plan, asked(stages=2, micro_batch=2), probe)
    assert free.splits == ["head"]
    less = pipeline("stages=2", memory=demand(free, probe).peak / MIB)
    tight = best_that_fits(less, asked(stages=2, micro_batch=2), probe)
    assert tight.splits != ["head"]
    assert demand(tight, probe).peak <= room_of(less, probe)


@pytest.mark.parametrize(
    ("frozen", "words", "splits"),
    [
        (("stem", "stage1/unit1"), {"stages": 2}, ["stage3/unit1"]),
        (("stem", "stage1/unit1", "stage2/unit1"), {"stages": 2}, ["head"]),
        (("stem",), {"stages": 2, "virtual_stages": 2}, ["stage2/unit1", "stage3/unit1", "head"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory", [1000, 5], ids=["free", "tight"])
def test_balanced_stages_all_have_something_to_train_before_they_fit(
    frozen: tuple[str, ...], words: dict[str, int], splits: list[str], memory: float
) -> None:
    plan = staged_and_frozen(frozen, words, memory)
    probe = probe_of(plan)
    slow = [replace(one, forward=1 + 9 * (number == 0)) for number, one in enumerate(probe.blocks)]
    best = best_that_fits(plan, asked(micro_batch=2, **words), replace(probe, blocks=tuple(slow)))
    assert best.splits == splits


@pytest.mark.parametrize("micro_batch", [2, "auto"])
def test_stages_with_nothing_to_train_are_refused_where_no_balance_helps(micro_batch: Any) -> None:
    plan = staged_and_frozen(("stem", "stage1", "stage2", "stage3"), {"stages": 2})
    with pytest.raises(PlanError, match=r"on.stages=2, and freeze leaves 1 block to train; write at most that"):
        best_that_fits(plan, asked(stages=2, micro_batch=micro_batch), probe_of(plan))


def staged_and_frozen(frozen: tuple[str, ...], words: dict[str, int], memory: float = 1000) -> Plan:
    plan = pipeline(*(f"{key}={value}" for key, value in words.items()), memory=memory)
    return replace(plan, recipe=plan.recipe.model_copy(update={"freeze": frozen}))


def test_a_stage_that_does_not_fit_is_computed_again_and_the_others_are_not() -> None:
    words = ("stages=2", "splits=[stage3]")
    plan = pipeline(*words)
    probe = probe_of(plan)
    less = pipeline(*words, memory=0.8 * demand(plan, probe).peak / MIB)
    best = best_that_fits(less, asked(stages=2, micro_batch=2, splits=("stage3",), recompute=AUTO), probe)
    assert best.recomputed == ["stem", "stage1/unit1", "stage2/unit1"]
    assert demand(best, probe).peak < demand(less, probe).peak


def test_the_micro_batch_of_a_pipeline_leaves_no_stage_waiting_for_long() -> None:
    plan = make_plan("norm_batch=2", "global_batch=64", "on.stages=2", "on.data_on_device=false")
    probe = probe_of(plan)
    best = best_that_fits(plan, asked(stages=2), probe)
    times = {
        size: demand(best_that_fits(plan, asked(stages=2, micro_batch=size), probe), probe).seconds
        for size in (2, 4, 8, 16, 32, 64)
        if (plan := make_plan("norm_batch=2", "global_batch=64", "on.stages=2", f"on.micro_batch={size}"))
    }
    assert best.micro_batch == min(times, key=lambda size: times[size]) < 64


def test_only_micro_batches_that_the_schedule_takes_are_chosen() -> None:
    plan = make_plan("norm_batch=2", "global_batch=16", "on.stages=2", "on.pipeline=interleaved", "on.micro_batch=2")
    slow = probe_of(plan, seconds=Line(1e6, 1))
    assert best_that_fits(plan, asked(stages=2, pipeline="interleaved"), slow).micro_batch == 8  # and not all 16
