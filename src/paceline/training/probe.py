"""A probe: a few real steps at small micro-batches, by which memory and time of larger ones are predicted."""

from __future__ import annotations

import gc
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from paceline.data.load.batches import MicroBatch
from paceline.errors import PlanError
from paceline.facts import Line, Probe
from paceline.machine import Machine, processor_name
from paceline.planning import Plan
from paceline.probing import IN_A_STEP, probe_plan, probe_sizes, write_probe
from paceline.progress import Progress, progress_bar, silent
from paceline.rendezvous import die_with_parent
from paceline.training.device_step import device_update
from paceline.training.graphs import WARM_STEPS
from paceline.training.probed_blocks import BlockPoint, block_points, probed_blocks
from paceline.training.session import Session, open_session
from paceline.training.step import begin_step, end_step, take_step
from paceline.training.stopwatch import timed, wait_for

Result = TypeVar("Result")
LINEAR = 0.02
"""If the size before them is further off the line through the two largest, a larger one is probed."""
MOST_SIZES = 5
TIMES = 5
"""How often steps are timed; the median counts."""
EVALUATIONS = 3
"""The first one chooses kernels, and the second is recorded."""


@dataclass(frozen=True)
class _Point:
    """What micro-batches of one size took: bytes without the images of a step, and seconds."""

    size: int
    evaluated: int
    """Images that an evaluation takes at a time."""
    first: float
    following: float
    update: float
    held: float
    evaluation: float
    seconds: float
    update_seconds: float
    blocks: dict[str, BlockPoint]

    @property
    def passes(self) -> float:
        """The most that is taken in any pass."""
        return max(self.first, self.following)


def take_probe(plan: Plan, machine: Machine, progress: Progress = silent) -> Probe:
    """Measure what small micro-batches of a plan take of this process's device, on one replica."""
    sizes, points = probe_sizes(plan), list[_Point]()
    while sizes:
        progress("probing", len(points), len(points) + len(sizes))
        try:
            points.append(_try(plan, machine, sizes[0]))
        except torch.OutOfMemoryError:
            break
        del sizes[0]
        if not sizes and len(points) < MOST_SIZES and not _is_straight(points):
            sizes = [2 * points[-1].size]
    if len(points) < 2:
        raise PlanError(f"the memory does not hold micro-batches of {sizes[0]} images, which a probe would take")
    return _probe(plan, machine, points)


def _try(plan: Plan, machine: Machine, size: int) -> _Point:
    """What a micro-batch of one size takes."""
    blocks = None
    if plan.placement.compile:  # which leaves no blocks to look at
        blocks = _in_session(probe_plan(plan, machine, size, compile=False), _blocks)
        torch.compiler.reset()  # else the second size would be compiled for sizes of all kinds
    left = release_memory(plan.placement.device)
    return _in_session(probe_plan(plan, machine, size), partial(_point, blocks=blocks, left=left))


def release_memory(device: str) -> int:
    """Give back what earlier work in this process has left on a device; gives the bytes that stay in tensors."""
    gc.collect()
    if device != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever used
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _in_session(plan: Plan, work: Callable[[Session], Result]) -> Result:
    """Do some work in a session of a new run that leaves nothing behind; its weights are of no interest."""
    with TemporaryDirectory(prefix="paceline-probe-") as folder, open_session(plan, Path(folder)) as session:
        return work(session)


def _probe(plan: Plan, machine: Machine, points: Sequence[_Point]) -> Probe:
    """What the points say together."""
    on_cuda, smallest, last = plan.placement.device == "cuda", points[0], points[-1]

    def line(name: str, by: str = "size") -> Line:
        one, other = ((getattr(point, by), getattr(point, name)) for point in points[-2:])
        return Line.through(one, other) if one[0] != other[0] else Line(other[1], 0.0)

    def passes(name: str) -> Line:
        least = max(line(name).slope, _kept(points).slope)
        return Line(getattr(last, name) - least * last.size, least)

    return Probe(
        device=machine.accelerator if on_cuda else processor_name(),
        counted=not on_cuda,
        taken=time.time(),
        sizes=tuple(point.size for point in points),
        available=torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if on_cuda else machine.memory,
        first=passes("first"),
        following=passes("following"),
        update=line("update"),
        held=line("held"),
        evaluation=line("evaluation", "evaluated"),
        off=_off(points),
        seconds=_rising(line("seconds"), last),
        update_seconds=last.update_seconds,
        blocks=tuple(probed_blocks(smallest.blocks, last.blocks, (smallest.size, last.size))),
    )


def _rising(line: Line, last: _Point) -> Line:
    """The line of times, or where noise would let it rise from below zero, the one that rises from there."""
    return line if line.base >= 0 and line.slope > 0 else Line(0.0, last.seconds / last.size)


def _off(points: Sequence[_Point]) -> float:
    """How far the size before them is off the line through the two largest, as a fraction of what it took."""
    if len(points) < 3:
        return 0.0
    before, one, other = ((point.size, point.passes) for point in points[-3:])
    return abs(Line.through(one, other).at(before[0]) / before[1] - 1)


def _kept(points: Sequence[_Point]) -> Line:
    """What all blocks keep together."""
    one, other = ((point.size, sum(block.kept for block in point.blocks.values())) for point in points[-2:])
    return Line.through(one, other)


def _is_straight(points: Sequence[_Point]) -> bool:
    """Whether memory grows along a line, and no slower than what is kept: else something else takes the most yet."""
    one, other = ((point.size, point.passes) for point in points[-2:])
    return _off(points) <= LINEAR and Line.through(one, other).slope >= (1 - LINEAR) * _kept(points).slope


def _blocks(session: Session) -> dict[str, BlockPoint]:
    with closing(session.loader.training(0)) as steps:
        return block_points(session, next(steps)[0])


def _point(session: Session, blocks: dict[str, BlockPoint] | None, left: int) -> _Point:
    """What the session's micro-batches take, beside what was `left` in tensors before it; on a CPU, whose memory
    nothing measures, what is in tensors is counted."""
    plan, on_cuda = session.plan, session.world.device.type == "cuda"
    others = left + _input_bytes(session) if on_cuda else 0
    with closing(session.loader.training(0)) as steps:
        batches = next(steps)
        memory = _peaks(session, batches[:2]) if on_cuda else {}
        each, update = _seconds(session, batches)
        if on_cuda:
            memory["held"] = _held()
        evaluation = _evaluation_peak(session) if on_cuda else 0.0
        blocks = blocks or block_points(session, batches[0])
    return _Point(
        size=plan.micro_batch,
        evaluated=plan.evaluation_batch,
        **{part: size - others for part, size in (memory or _counted(blocks)).items()},
        evaluation=evaluation,
        seconds=each,
        update_seconds=update,
        blocks=blocks,
    )


def _counted(blocks: dict[str, BlockPoint]) -> dict[str, float]:
    """What is in tensors at the end of forward passes, and while weights are updated."""
    kept, weights, gradients, optimizer = (
        float(sum(getattr(point, name) for point in blocks.values()))
        for name in ("kept", "weights", "gradients", "optimizer")
    )
    state = weights + optimizer
    return {
        "first": state + max(kept, gradients),
        "following": state + gradients + kept,
        "update": state + gradients,
        "held": state,
    }


def _input_bytes(session: Session) -> int:
    """What the loader keeps on the device."""
    assert session.state
    before = torch.cuda.memory_allocated()
    assert session.loader
    return torch.cuda.memory_allocated() - before


def _peaks(session: Session, batches: list[MicroBatch]) -> dict[str, float]:
    """The most bytes in tensors in each part of a step of two micro-batches, kernels being chosen in the first step."""
    network, peaks = session.state.network, dict[str, float]()

    def watch(part: str, work: Callable[..., Result], *arguments: object) -> Result:
        torch.cuda.reset_peak_memory_stats()
        result = work(*arguments)
        peaks[part] = max(peaks.get(part, 0.0), torch.cuda.max_memory_allocated())
        return result

    for _ in range(WARM_STEPS):
        prepared, scale = begin_step(session, batches)
        network.compile_ahead(prepared[0], scale)
        sums = watch("first", network.forward_backward, prepared[:1], scale)
        watch("following", network.forward_backward, prepared[1:], scale, 1)
        norm_sums, all_sums = network.all_reduce(sums)
        end_step(session, watch("update", device_update, session, norm_sums, all_sums, scale))
    return peaks


def _seconds(session: Session, batches: list[MicroBatch]) -> tuple[float, float]:
    """How long a micro-batch takes, and the update, by steps of fewer and of more micro-batches."""
    device, graphs = session.world.device, session.plan.placement.graphs
    at_a_time = 3 if device.type == "cuda" else 1  # the host runs ahead of a device
    fewer, more = (2, IN_A_STEP) if graphs else (1, 2)  # those with a second one share a recording

    def timed_steps(count: int) -> float:
        def work() -> None:
            for _ in range(at_a_time):
                take_step(session, batches[:count])

        for _ in range(WARM_STEPS + 1 if graphs else 1):
            take_step(session, batches[:count])
        wait_for(device)
        return median(timed(device, work) for _ in range(TIMES)) / at_a_time

    little, much = timed_steps(fewer), timed_steps(more)
    each = min(max(0.0, much - little) / (more - fewer), little / fewer)
    return each, little - fewer * each


def _held() -> float:
    """What is held between steps, with the memory of CUDA graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _evaluation_peak(session: Session) -> float:
    """The most that an evaluation takes beside what is held."""
    network, before = session.state.network, torch.cuda.memory_allocated()
    with closing(session.loader.validation()) as batches, network.evaluating():
        images = next(batches).images
        torch.cuda.reset_peak_memory_stats()
        for _ in range(EVALUATIONS):
            network.scores(images)
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Take a probe in a process of its own: python -m paceline.training.probe TASK RESULT, both of them files."""
    die_with_parent()  # a job that was killed leaves nothing on the device
    task, result = map(Path, sys.argv[1:])
    plan, machine = pickle.loads(task.read_bytes())
    with progress_bar() as progress:
        write_probe(result, take_probe(plan, machine, progress))


if __name__ == "__main__":
    main()
