"""Stages of a pipeline: what cannot be shared between them, and where blocks are parted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paceline.errors import PlanError
from paceline.planning import Plan
from paceline.settings.model import External


def check_stages(plan: Plan) -> None:
    """Refuse stages that the network or the placement cannot have, and splits that do not make them."""
    placement, blocks, stages = plan.placement, plan.network.blocks, plan.stages
    named = [plan.network.chosen("on.splits", [name])[0] for name in placement.splits]
    if named and len(named) != stages - 1:
        raise PlanError(
            f"on.splits names {len(named)} of the blocks that begin stages 2, 3 and so on, and on.stages is {stages}; "
            f"write on.stages={len(named) + 1}, or name {stages - 1 or 'none'}"
        )
    if stages == 1:
        return
    _check_placement(plan)
    if isinstance(plan.recipe.model, External):
        raise PlanError("a network of another package is one block, which stages cannot share; write on.stages=1")
    if stages > len(blocks):
        raise PlanError(f"on.stages={stages}, and the network has {len(blocks)} blocks; write at most that")
    if named and (blocks[0] in named or len(set(named)) < len(named)):
        raise PlanError(
            f"on.splits: each names the first block of another stage, and the first stage begins at '{blocks[0]}' by "
            f"itself; choose {stages - 1} of {', '.join(blocks[1:])}"
        )
    if named:
        _check_trained(plan)


def _check_placement(plan: Plan) -> None:
    """Refuse what stages cannot be combined with."""
    placement = plan.placement
    if placement.compile:
        raise PlanError("on.compile=true fuses a whole network, and a stage has a part of one; leave one of them out")
    if placement.device == "mps":
        raise PlanError("on.stages are processes with a device each, and there is one mps device; write on.stages=1")
    if placement.weights in ("bf16", "fp16") and placement.stochastic_rounding:
        raise PlanError(
            f"on.stages would change how {placement.weights} weights are rounded; write on.weights=fp32, or "
            "on.stochastic_rounding=false"
        )
    fewest = plan.micro_batches // plan.replicas
    if placement.pipeline == "interleaved" and 0 < fewest < plan.stages:
        raise PlanError(
            f"on.pipeline=interleaved needs as many micro-batches of each replica in a step as there are stages, "
            f"{plan.stages}, and there are {fewest}; write on.pipeline=grouped, or a smaller on.micro_batch than "
            f"{plan.micro_batch}"
        )


def _check_trained(plan: Plan) -> None:
    """Refuse a stage of which every block is frozen: no gradient would come through it."""
    stages = parted(plan.network.blocks, plan.splits)
    for number, blocks in enumerate(stages, 1):
        if set(blocks) <= set(plan.frozen):
            raise PlanError(
                f"stage {number} of {len(stages)} has only blocks that freeze names ({', '.join(blocks)}); write fewer "
                "on.stages, or on.splits that leave each stage something to train"
            )


def parted(blocks: Sequence[str], splits: Sequence[str]) -> list[list[str]]:
    """The blocks of each stage."""
    starts = [0, *(blocks.index(name) for name in splits)]
    return [list(blocks[a:b]) for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True)]


def balanced(blocks: Sequence[str], costs: Sequence[int], stages: int) -> list[str]:
    """The splits with which the stage that costs most costs least, and the others about the same."""
    sums, count = [0, *accumulate(costs)], len(blocks)
    # Of the blocks from the i-th on: the most that a stage of them costs, the squares of all, where stages begin.
    best = [(sums[count] - sums[i], (sums[count] - sums[i]) ** 2, [i]) for i in range(count)]
    for later in range(1, stages):
        best = [
            min(_with_stage(sums[end] - sums[i], i, best[end]) for end in range(i + 1, count - later + 1))
            for i in range(count - later)
        ]
    return [blocks[start] for start in best[0][2][1:]]


def _with_stage(cost: int, start: int, rest: tuple[int, int, list[int]]) -> tuple[int, int, list[int]]:
    most, squares, starts = rest
    return max(cost, most), cost**2 + squares, [start, *starts]


def stage_numbers(plan: Plan) -> dict[str, int | float | str]:
    """What a plan tells of a pipeline, if there is one."""
    if plan.stages == 1:
        return {}
    begin = ", ".join(plan.splits) or "as balanced at the start"
    return {"stages": plan.stages, "stages begin at": begin, "idle share of a stage": round(idle_share(plan), 3)}


def idle_share(plan: Plan) -> float:
    """The part of a step's passes in which a stage waits for others, if all stages have the same work."""
    rounds, others = plan.rounds, plan.stages - 1
    return others / plan.stages if plan.placement.pipeline == "sequential" else others / (rounds + others)
