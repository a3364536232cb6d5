"""What steps take of a device, predicted from a probe, and the largest micro-batch and least recomputation that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from paceline.errors import PlanError
from paceline.facts import Probe
from paceline.layouts import fitting_sizes
from paceline.planning import Plan
from paceline.settings.data import POOL
from paceline.settings.placement import AUTO, Placement

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
    """What the steps of a plan take of its device."""
    weights, gradients, optimizer = (
        float(sum(getattr(block, name) for block in probe.blocks)) for name in ("weights", "gradients", "optimizer")
    )
    spared, (inputs, evaluated) = _spared(plan, probe), _inputs(plan)
    kept, working, entering = _blocks(plan, probe)
    cuts, nothing = _cuts(plan, plan.recomputed), [0.0] * len(kept)
    there = at_once(kept, nothing, entering, cuts)
    passes = _beside(plan, probe) + at_once(kept, working, entering, cuts)
    update = probe.update.at(plan.micro_batch) + _exchanged(plan, probe) + inputs - spared
    graphs = there - sum(kept) if plan.placement.graphs else 0.0
    held = probe.held.at(plan.micro_batch) + graphs - spared
    return Demand(
        weights=weights,
        gradients=gradients if plan.rounds > 1 or update > passes else 0.0,
        optimizer=optimizer - spared,
        kept=there if passes >= update else 0.0,
        inputs=inputs,
        step=max(passes, update),
        evaluation=held + probe.evaluation.at(plan.evaluation_batch) + evaluated,
        seconds=step_seconds(plan, probe),
    )


def step_seconds(plan: Plan, probe: Probe) -> float:
    """How long a step takes a device."""
    cuts = _cuts(plan, plan.recomputed)
    again = sum(block.forward for block in probe.blocks[: max(cuts, default=0)]) * plan.micro_batch
    return plan.rounds * (probe.seconds.at(plan.micro_batch) + again) + probe.update_seconds


def room_of(plan: Plan, probe: Probe) -> float:
    """Bytes that a step may take: all that the placement allows and the device has, less the margin."""
    return (1 - MARGIN) * _memory(plan, probe)


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
    plans = [_placed(plan, size, asked, probe) for size in sizes]
    demands = [(each, demand(each, probe)) for each in plans]
    fitting = [(each, needs) for each, needs in demands if needs.peak <= room_of(plan, probe)]
    if fitting:
        return min(fitting, key=lambda pair: (pair[1].seconds, -pair[0].micro_batch))[0]
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
    """The plan with micro-batches of this size, and as little recomputation as fits if that is left to the machine."""
    kept_all = plan.placement.model_copy(update={"micro_batch": size, "recompute": ()})
    if asked.recompute != AUTO:
        return replace(plan, placement=kept_all.model_copy(update={"recompute": plan.placement.recompute}))
    placed = replace(plan, placement=kept_all)
    cuts = least_cuts(*_blocks(placed, probe), room_of(placed, probe) - _beside(placed, probe))
    names = ("all",) if cuts is None else tuple(plan.network.blocks[cut] for cut in cuts)
    return replace(placed, placement=kept_all.model_copy(update={"recompute": names}))


def _cuts(plan: Plan, names: Sequence[str]) -> list[int]:
    """The numbers of the blocks that the network is cut before; before the first there is nothing to cut."""
    return [number for number, name in enumerate(plan.network.blocks) if name in names and number]


def _blocks(plan: Plan, probe: Probe) -> tuple[list[float], list[float], list[float]]:
    """Of each block what it keeps of a micro-batch, what its backward pass takes for a moment, and what enters it."""
    kept, working, passed = (
        [max(0.0, getattr(block, name).at(plan.micro_batch)) for block in probe.blocks]
        for name in ("kept", "working", "passed")
    )
    return kept, working, [0.0, *passed[:-1]]


def _beside(plan: Plan, probe: Probe) -> float:
    """What the passes of a step take at the most, beside what the backward passes need."""
    lines = [probe.first] if plan.rounds == 1 else [probe.first, probe.following]
    passes = max(line.at(plan.micro_batch) for line in lines) - at_once(*_blocks(plan, probe), ())
    return passes + _exchanged(plan, probe) + _inputs(plan)[0] - _spared(plan, probe)


def _spared(plan: Plan, probe: Probe) -> float:
    """State of the optimizer that other replicas keep."""
    return sum(block.optimizer for block in probe.blocks) * (1 - 1 / plan.replicas) if plan.shards else 0.0


def _exchanged(plan: Plan, probe: Probe) -> float:
    """The buckets in which several replicas exchange gradients, beside the gradients."""
    if plan.replicas == 1:
        return 0.0
    return sum(block.gradients for block in probe.blocks) * (1.5 if plan.placement.communication == "bf16" else 1.0)


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
