"""What steps take of a device, predicted from a probe, and the largest micro-batch and least recomputation that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from paceline.errors import PlanError
from paceline.facts import Probe
from paceline.layouts import fitting_sizes
from paceline.planning import Plan
from paceline.settings.data import POOL
from paceline.settings.placement import AUTO, Placement
from paceline.stages import balanced, check_stages, shares_of_stages

MARGIN = 0.1
"""The part of the memory that a choice leaves free: for memory in pieces, and the error of a prediction."""

_REMEDY = "more on.replicas, or a smaller norm_batch, which is another recipe"


@dataclass(frozen=True)
class Demand:
    """What the steps of a plan take of its device, as a probe predicts it, in bytes and seconds."""

    weights: float
    gradients: float
    """Those that are there at the moment at which a step takes the most."""
    optimizer: float
    kept: float
    """What forward passes have kept for backward passes at that moment."""
    inputs: float
    """The images of a step."""
    step: float
    """The most that a step takes."""
    evaluation: float
    """The most that a validation takes."""
    seconds: float
    """How long a step takes."""

    @property
    def peak(self) -> float:
        """The most that is taken at any time."""
        return max(self.step, self.evaluation)

    @property
    def workspace(self) -> float:
        """What a step takes at that moment beside everything that has a name."""
        return self.step - self.weights - self.gradients - self.optimizer - self.kept - self.inputs


def demand(plan: Plan, probe: Probe) -> Demand:
    """What the steps of a plan take of its device; in a pipeline, of that of the stage that takes the most."""
    parts, sizes = _parts(plan, probe), _sizes(plan, probe)
    stages = [_of_stage(plan, probe, sizes, parts[stage :: plan.stages], stage) for stage in range(plan.stages)]
    return replace(max(stages, key=lambda needs: needs.peak), seconds=step_seconds(plan, probe))


def _of_stage(plan: Plan, probe: Probe, sizes: _Sizes, parts: Sequence[_Part], stage: int) -> Demand:
    """What the steps of a plan take of the device of a stage that has these parts of the network."""
    own, accumulates = _state(probe, parts), plan.rounds > 1
    weights, gradients, optimizer = own
    absent = [whole - here for whole, here in zip(_state(probe), own, strict=True)]  # which was there in the probe
    spared = optimizer * (1 - 1 / plan.replicas) if plan.shards else 0.0  # which other replicas keep
    inputs, evaluated = _inputs(plan) if stage == 0 else (0.0, 0.0)
    sent = 0.0 if plan.replicas == 1 else gradients * (1.5 if plan.placement.communication == "bf16" else 1.0)
    there, needed = _at_once_in(plan, sizes, parts, stage)
    passes = sizes.beside + needed - absent[0] - absent[2] - (absent[1] if accumulates else 0.0)
    update = probe.update.at(plan.micro_batch) - sum(absent)
    held = probe.held.at(plan.micro_batch) - absent[0] - absent[2] - spared
    graphs = there - sum(sizes.kept) if plan.placement.graphs else 0.0
    averaged = weights if plan.recipe.ema.decay is not None else 0.0  # aside while the average is evaluated
    return Demand(
        weights=weights,
        gradients=gradients if accumulates or update > passes else 0.0,
        optimizer=optimizer - spared,
        kept=there if passes >= update else 0.0,
        inputs=inputs,
        step=max(passes, update) + sent + inputs - spared,
        evaluation=held + graphs + averaged + probe.evaluation.at(plan.evaluation_batch) + evaluated,
        seconds=0.0,  # of all stages together
    )


def step_seconds(plan: Plan, probe: Probe) -> float:
    """How long a step takes, if nothing but the passes and the update does."""
    parts, cuts = _parts(plan, probe), _cuts(plan)
    each, whole = probe.seconds.at(plan.micro_batch), sum(block.forward + block.backward for block in probe.blocks)
    stages = [0.0] * plan.stages
    for number, (begin, end) in enumerate(parts):
        again = max((cut for cut in cuts if begin < cut < end), default=begin)
        share = sum(block.forward + block.backward for block in probe.blocks[begin:end]) / whole
        repeated = sum(block.forward for block in probe.blocks[begin:again]) * plan.micro_batch
        stages[number % plan.stages] += each * share + repeated
    if plan.placement.pipeline == "sequential":
        return plan.rounds * sum(stages) + probe.update_seconds
    turns = plan.rounds + (plan.stages - 1) * plan.stages / plan.parts
    return turns * max(stages) + probe.update_seconds


def measured_shares(plan: Plan, probe: Probe) -> tuple[float, ...]:
    """What part of the time of the passes each stage of a pipeline has."""
    blocks, parts = plan.network.blocks, _parts(plan, probe)
    costs = {block.name: block.forward + block.backward for block in probe.blocks}
    return tuple(shares_of_stages(costs, [blocks[begin:end] for begin, end in parts], plan.stages))


def room_of(plan: Plan, probe: Probe) -> float:
    """Bytes that a step may take: all that the placement allows and the device has, less the margin."""
    return (1 - MARGIN) * _memory(plan, probe)


def _runs(plan: Plan) -> bool:
    """Whether a pipeline takes so many micro-batches, and each of its parts has something to train."""
    try:
        check_stages(plan)
    except PlanError:
        return False
    return True


def _memory(plan: Plan, probe: Probe) -> int:
    return min(plan.placement.memory, probe.available)


def best_that_fits(plan: Plan, asked: Placement, probe: Probe, below: int | None = None) -> Plan:
    """The plan with the micro-batch and the recomputation that are left to the machine: of those that fit its memory,
    those that take the least time, and of equals the largest micro-batch. `below` is a size that did not fit."""
    sizes = [plan.micro_batch]
    if asked.micro_batch == "auto" or (below is not None and plan.micro_batch >= below):
        sizes = [
            size for size in fitting_sizes(plan.recipe, plan.norm_batch, plan.replicas) if size < (below or size + 1)
        ]
    plans = [placed for size in sizes if _runs(placed := _placed(plan, size, asked, probe))]
    demands = [(each, demand(each, probe)) for each in plans]
    fitting = [(each, needs) for each, needs in demands if needs.peak <= room_of(plan, probe)]
    if fitting:
        return min(fitting, key=lambda pair: (pair[1].seconds, -pair[0].micro_batch))[0]
    if not demands and below is None:
        placed = _placed(plan, plan.micro_batch, asked, probe)
        check_stages(placed)  # which says what is wrong with its parts: the plan was made with this size
        return placed
    if not demands:
        raise PlanError(f"on.micro_batch={below} did not fit the memory, and no smaller one fits the recipe; {_REMEDY}")
    smallest, needs = min(demands, key=lambda pair: pair[1].peak)
    if needs.peak > _memory(plan, probe) and asked.micro_batch == "auto":
        more = "" if asked.recompute == AUTO else "on.recompute=auto, "
        raise PlanError(
            f"on.micro_batch={smallest.micro_batch} is the least that fits the recipe, and a step would take "
            f"{size_text(needs.peak)} of {size_text(_memory(plan, probe))}; write {more}{_REMEDY}"
        )
    return smallest


def size_text(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"


def at_once(kept: Sequence[float], working: Sequence[float], entering: Sequence[float], cuts: Sequence[int]) -> float:
    """The most that backward passes need at one time, if the network is cut before these blocks: of each piece what
    entered it and those before it, and what its blocks keep, until they have had their turn, each working by itself."""
    most, held = 0.0, 0.0
    for begin, end in pairwise([0, *cuts, len(kept)]):
        held += entering[begin] if begin else 0.0
        most = max(most, held + _of_piece(kept, working, begin, end))
    return most


def least_cuts(
    kept: Sequence[float], working: Sequence[float], entering: Sequence[float], room: float
) -> list[int] | None:
    """The blocks to cut before so that no more than `room` is needed at one time, and as few blocks as possible are
    computed again, which are those before the last cut; None where no cuts do."""
    count = len(kept)
    if _of_piece(kept, working, 0, count) <= room:
        return []
    best = {0: (0.0, list[int]())}  # for a cut before a block: the least that is held by then, and the cuts
    for end in range(1, count):
        fitting = [held for begin, held in best.items() if held[0] + _of_piece(kept, working, begin, end) <= room]
        if fitting:
            held, cuts = min(fitting)
            best[end] = held + entering[end], [*cuts, end]
            if best[end][0] + _of_piece(kept, working, end, count) <= room:
                return best[end][1]
    return None


def _of_piece(kept: Sequence[float], working: Sequence[float], begin: int, end: int) -> float:
    """The most that the backward passes of these blocks need, the last one first, when all of them have kept theirs."""
    sums = accumulate(kept[begin:end])
    return max(held + needed for held, needed in zip(sums, working[begin:end], strict=True))


def _placed(plan: Plan, size: int, asked: Placement, probe: Probe) -> Plan:
    """The plan with micro-batches of this size; if that is left to the machine, its stages are balanced by time as far
    as the memory allows, and as little is recomputed as fits."""
    changes: dict[str, Any] = {"micro_batch": size}
    if asked.recompute == AUTO:
        changes["recompute"] = ()
    if plan.stages > 1 and not asked.splits:
        changes["splits"] = ()
    placed = _changed(plan, **changes)
    if "splits" in changes:
        placed = _changed(placed, splits=tuple(_balanced(placed, probe)))
    if "recompute" in changes:
        placed = _changed(placed, recompute=_least_recomputed(placed, probe))
    return _evaluating_less(placed, probe)


def _evaluating_less(plan: Plan, probe: Probe) -> Plan:
    """The plan with as many images fewer evaluated at a time as the memory asks for: training should not suffer."""
    count, facts = plan.evaluation_batch, plan.facts
    over = demand(plan, probe).evaluation - room_of(plan, probe)
    each = probe.evaluation.slope + facts.channels * (facts.evaluation_side or facts.side) ** 2
    if over <= 0 or each <= 0:
        return plan
    fewer = max(1, count - math.ceil(over / each))
    return replace(plan, most_evaluated=fewer // 8 * 8 or fewer)


def _changed(plan: Plan, **placed: Any) -> Plan:
    return replace(plan, placement=plan.placement.model_copy(update=placed))


def _balanced(plan: Plan, probe: Probe) -> list[str]:
    """The splits with which no stage takes longer than need be, and each has something to train and fits its memory if
    that can be."""
    sizes, room = _sizes(plan, probe), room_of(plan, probe)

    def fits(begin: int, end: int, part: int) -> bool:
        return plan.parts > plan.stages or _of_stage(plan, probe, sizes, [(begin, end)], part).step <= room

    times = [block.forward + block.backward for block in probe.blocks]
    return balanced(plan.network.blocks, times, plan.parts, fits, plan.frozen)


def _least_recomputed(plan: Plan, probe: Probe) -> tuple[str, ...]:
    """The blocks to cut before so that as few as possible are computed again; in a pipeline all of a stage, or none."""
    sizes, blocks, room = _sizes(plan, probe), plan.network.blocks, room_of(plan, probe)
    if plan.stages == 1:
        cuts = least_cuts(sizes.kept, sizes.working, sizes.entering, room - sizes.beside - _inputs(plan)[0])
        return ("all",) if cuts is None else tuple(blocks[cut] for cut in cuts)
    parts, chosen = _parts(plan, probe), list[str]()
    for stage in range(plan.stages):
        own = parts[stage :: plan.stages]
        if _of_stage(plan, probe, sizes, own, stage).step > room:
            chosen += [name for begin, end in own for name in blocks[begin:end]]
    return tuple(chosen)


_Part = tuple[int, int]
"""Blocks that are neighbors: the number of the first, and of the one behind the last."""


@dataclass(frozen=True)
class _Sizes:
    """What a probe says of a plan's micro-batch, block by block and beside the blocks."""

    kept: list[float]
    working: list[float]
    entering: list[float]
    """What enters each block but the first, from the one before it."""
    beside: float
    """The most that passes take beside what backward passes need."""
    cuts: list[int]
    """The blocks that the network is cut before; before the first there is nothing to cut."""


def _sizes(plan: Plan, probe: Probe) -> _Sizes:
    kept, working, passed = (
        [max(0.0, getattr(block, name).at(plan.micro_batch)) for block in probe.blocks]
        for name in ("kept", "working", "passed")
    )
    entering = [0.0, *passed[:-1]]
    lines = [probe.first] if plan.rounds == 1 else [probe.first, probe.following]
    passes = max(line.at(plan.micro_batch) for line in lines)
    return _Sizes(kept, working, entering, passes - at_once(kept, working, entering, ()), _cuts(plan))


def _parts(plan: Plan, probe: Probe) -> list[_Part]:
    """The parts of the network, in order; the first stage has the first, and so on in turn."""
    blocks = plan.network.blocks
    splits = plan.splits or (_balanced(plan, probe) if plan.stages > 1 else [])
    return list(pairwise([0, *(blocks.index(name) for name in splits), len(blocks)]))


def _state(probe: Probe, parts: Sequence[_Part] | None = None) -> tuple[float, float, float]:
    """Weights, gradients and the optimizer's state of some parts of the network, or of all of it."""
    chosen = [block for begin, end in (parts or [(0, len(probe.blocks))]) for block in probe.blocks[begin:end]]
    weights, gradients, optimizer = (
        float(sum(getattr(block, name) for block in chosen)) for name in ("weights", "gradients", "optimizer")
    )
    return weights, gradients, optimizer


def _cuts(plan: Plan) -> list[int]:
    recomputed = set(plan.recomputed)
    return [number for number, name in enumerate(plan.network.blocks) if name in recomputed and number]


def _at_once_in(plan: Plan, sizes: _Sizes, parts: Sequence[_Part], stage: int) -> tuple[float, float]:
    """The most that a stage has kept at one time, and that with what it works with; of each micro-batch under way what
    stays until its backward pass, of one of them what is computed again as well."""
    stays = there = needed = 0.0
    nothing = [0.0] * len(sizes.kept)
    for begin, end in parts:
        own = [cut - begin for cut in sizes.cuts if begin < cut < end]
        kept, entering = sizes.kept[begin:end], sizes.entering[begin:end]
        left = sum(entering[cut] for cut in own) + sum(kept[max(own, default=0) :])
        received, sent = entering[0], sizes.entering[end] if end < len(sizes.kept) else 0.0
        stays += left + received + sent
        there = max(there, at_once(kept, nothing[begin:end], entering, own) - left)
        needed = max(needed, at_once(kept, sizes.working[begin:end], entering, own) - left)
    under_way = _under_way(plan, stage)
    return under_way * stays + there, under_way * stays + needed


def _under_way(plan: Plan, stage: int) -> float:
    """How many micro-batches a stage has taken forward and not yet back, at the most."""
    later, loops = plan.stages - 1 - stage, plan.parts // plan.stages
    match plan.placement.pipeline:
        case "sequential":
            return 1
        case "grouped":
            return plan.rounds if plan.stages > 1 else 1
        case "interleaved":
            return min(plan.rounds, 1 + later if loops == 1 else 1 + (2 * later + (loops - 1) * plan.stages) / loops)


def _inputs(plan: Plan) -> tuple[float, float]:
    """The images of a step and of a batch of a validation, and those that are on the device all along with either."""
    facts, size = plan.facts, plan.micro_batch
    image = facts.channels * facts.side**2
    evaluated = facts.channels * (facts.evaluation_side or facts.side) ** 2
    policy = plan.rounds * size * image if plan.recipe.augment.policy else 0  # which leaves images of its own
    if plan.data.name == "synthetic":
        pools = (POOL + size) * image + (POOL + plan.evaluation_batch) * evaluated
        return pools + policy, pools
    stays = 0
    if plan.placement.data_on_device:
        border = 2 * plan.recipe.augment.pad
        stays = (facts.images + facts.validation_images) * facts.channels * (facts.side + border) ** 2
    return stays + plan.rounds * size * image + policy, stays + plan.evaluation_batch * evaluated
