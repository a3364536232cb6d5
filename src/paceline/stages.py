"""Stages of a pipeline: what cannot be shared between them, and where blocks are parted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

from paceline.errors import PlanError
from paceline.planning import Plan
from paceline.settings.model import External
from paceline.visible import plural


def check_stages(plan: Plan) -> None:
    """Refuse stages that the network or the placement cannot have, and splits that do not make them."""
    placement, blocks, parts = plan.placement, plan.network.blocks, plan.parts
    named = [plan.network.chosen("on.splits", [name])[0] for name in placement.splits]
    times = f" times on.virtual_stages={placement.virtual_stages}" if _loops(plan) else ""
    asked = f"on.stages={plan.stages}{times}"
    if named and len(named) != parts - 1:
        fewer = "" if _loops(plan) else f"write on.stages={len(named) + 1}, or "
        raise PlanError(
            f"on.splits names {len(named)} of the blocks that begin {part_name(plan)}s 2, 3 and so on, for {asked}; "
            f"{fewer}name {parts - 1 or 'none'}"
        )
    if plan.stages == 1:
        return
    _check_placement(plan)
    if isinstance(plan.recipe.model, External):
        raise PlanError("a network of another package is one block, which stages cannot share; write on.stages=1")
    if parts > len(blocks):
        raise PlanError(f"{asked}, and the network has {len(blocks)} blocks; write at most that")
    if named and (blocks[0] in named or len(set(named)) < len(named)):
        raise PlanError(
            f"on.splits: each names the first block of another {part_name(plan)}, and the first one begins at "
            f"'{blocks[0]}' by itself; choose {parts - 1} of {', '.join(blocks[1:])}"
        )
    learning = len(set(blocks) - set(plan.frozen))
    if learning < parts:
        raise PlanError(f"{asked}, and freeze leaves {plural(learning, 'block')} to train; write at most that")
    if named:
        _check_trained(plan)


def _check_placement(plan: Plan) -> None:
    """Refuse what stages cannot be combined with."""
    placement = plan.placement
    if placement.compile:
        raise PlanError("on.compile=true fuses a whole network, and a stage has a part of one; leave one of them out")
    if placement.device == "mps":
        raise PlanError("on.stages are processes with a device each, and there is one mps device; write on.stages=1")
    if placement.pipeline == "interleaved":
        _check_interleaved(plan)


def _check_interleaved(plan: Plan) -> None:
    """Refuse numbers of micro-batches that torch's schedules do not take."""
    fewest, most = plan.micro_batches // plan.replicas, plan.rounds
    if 0 < fewest < plan.stages:
        raise PlanError(
            f"on.pipeline=interleaved needs as many micro-batches of each replica in a step as there are stages, "
            f"{plan.stages}, and there are {fewest}; write on.pipeline=grouped, or a smaller on.micro_batch than "
            f"{plan.micro_batch}"
        )
    if _loops(plan) and (fewest % plan.stages or most % plan.stages):
        counts = f"{fewest}" if fewest == most else f"{fewest} or {most}"
        raise PlanError(
            f"on.pipeline=interleaved with on.virtual_stages takes the micro-batches of each replica in rounds of "
            f"{plan.stages}, and there are {counts} in a step; write on.pipeline=grouped, or another on.micro_batch "
            f"than {plan.micro_batch}"
        )


def _loops(plan: Plan) -> bool:
    """Whether a pass comes to each stage several times."""
    return plan.parts > plan.stages


def part_name(plan: Plan) -> str:
    """What a run of blocks is called where a stage has one, or several."""
    return "virtual stage" if _loops(plan) else "stage"


def _check_trained(plan: Plan) -> None:
    """Refuse a part of which every block is frozen: no gradient would come through it."""
    parts = parted(plan.network.blocks, plan.splits)
    for number, blocks in enumerate(parts, 1):
        if set(blocks) <= set(plan.frozen):
            raise PlanError(
                f"{part_name(plan)} {number} of {len(parts)} has only blocks that freeze names ({', '.join(blocks)}); "
                "write fewer on.stages, or on.splits that leave each something to train"
            )


def parted(blocks: Sequence[str], splits: Sequence[str]) -> list[list[str]]:
    """The blocks of each part."""
    starts = [0, *(blocks.index(name) for name in splits)]
    return [list(blocks[a:b]) for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True)]


def balanced(
    blocks: Sequence[str],
    costs: Sequence[float],
    parts: int,
    fits: Callable[[int, int, int], bool] = lambda begin, end, part: True,  # noqa: ARG005
    frozen: Collection[str] = (),
) -> list[str]:
    """The splits with which the part that costs most costs least, and the others about the same; if that can be, no
    part has only `frozen` blocks, and then, if that can be, all parts fit: `fits(begin, end, part)` says whether the
    blocks from `begin` to before `end` do."""
    sums, count = [0.0, *accumulate(costs)], len(blocks)
    trained = [0, *accumulate(name not in frozen for name in blocks)]

    def with_part(begin: int, end: int, later: int, rest: _Rest) -> _Rest:
        cost = sums[end] - sums[begin]
        idle = rest[0] + (trained[begin] == trained[end])
        misfits = rest[1] + (not fits(begin, end, parts - 1 - later))
        return idle, misfits, max(cost, rest[2]), cost**2 + rest[3], [begin, *rest[4]]

    # Of the blocks from the i-th on: how many parts of them train nothing, how many do not fit, the most that one
    # costs, the squares of all, where parts begin.
    best = [with_part(i, count, 0, (0, 0, 0.0, 0.0, [])) for i in range(count)]
    for later in range(1, parts):
        best = [
            min(with_part(i, end, later, best[end]) for end in range(i + 1, count - later + 1))
            for i in range(count - later)
        ]
    return [blocks[start] for start in best[0][4][1:]]


_Rest = tuple[int, int, float, float, list[int]]


def shares_of_stages(costs: Mapping[str, float], parts: Sequence[Sequence[str]], stages: int) -> list[float]:
    """What part of the cost of all blocks each stage has."""
    whole = sum(costs.values()) or 1.0
    return [sum(costs[name] for blocks in parts[stage::stages] for name in blocks) / whole for stage in range(stages)]


def stage_numbers(plan: Plan) -> dict[str, int | float | str]:
    """What a plan tells of a pipeline, if there is one."""
    if plan.stages == 1:
        return {}
    begin = ", ".join(plan.splits) or "as balanced at the start"
    parts = {"virtual stages of each": plan.placement.virtual_stages} if _loops(plan) else {}
    return {
        "stages": plan.stages,
        **parts,
        f"{part_name(plan)}s begin at": begin,
        **({"time of each stage": percents(plan.shares)} if plan.shares else {}),
        "idle share of a stage": round(idle_share(plan), 3),
    }


def percents(shares: Sequence[float]) -> str:
    """Shares for people."""
    return ", ".join(f"{share:.0%}" for share in shares)


def idle_share(plan: Plan) -> float:
    """The part of a step's passes in which a stage waits for others, if all stages have the same work."""
    passes, others = plan.rounds * plan.placement.virtual_stages, plan.stages - 1
    return others / plan.stages if plan.placement.pipeline == "sequential" else others / (passes + others)
