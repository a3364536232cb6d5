"""Torch's pipeline schedules on the stages of a replica; beside `world`, the only user of torch.distributed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    schedules,
)

from paceline.world import World

# A fault is told once, in one line of ours, and not with torch's whole schedule around it.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)


class TensorShape(NamedTuple):
    """What a stage must know of a tensor before it comes."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.size, dtype=self.dtype, device=device)


class Ends(NamedTuple):
    """The tensors that come into a part of the network, and those that go out of it."""

    inputs: Sequence[TensorShape]
    outputs: Sequence[TensorShape]


class Passes(NamedTuple):
    """What a stage does with a micro-batch, whose number is an argument, because several are in flight."""

    forward: Callable[..., Any]
    """forward(part, number, *carried): a forward pass through a part, by what came from the one before it."""
    loss: Callable[[Any, int], Tensor]
    """loss(output, number): the loss by the output of the last part."""


class StageTimes:
    """When steps, and a stage's own passes in them, began and ended: by events on CUDA, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.steps: list[tuple[Any, Any]] = []
        self.passes: list[tuple[Any, Any]] = []

    @contextmanager
    def noting(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """Add what is done inside to some spans."""
        begin = self._now()
        yield
        spans.append((begin, self._now()))

    def seconds(self) -> tuple[float, float]:
        """The time of the steps, and of the passes; the device must have done them."""
        return self._sum(self.steps), self._sum(self.passes)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _sum(self, spans: list[tuple[Any, Any]]) -> float:
        if self._on_cuda:
            return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1000
        return sum(float(end - begin) for begin, end in spans)


class Pipeline:
    """Takes a step's micro-batches through the stages of a replica, forward and backward, in one of torch's orders.

    Gradients add up in the parameters.
    """

    def __init__(
        self,
        world: World,
        order: Literal["grouped", "interleaved", "sequential"],
        micro_batches: int,
        own: Mapping[int, Ends],
        parts: int,
    ) -> None:
        """`own` are this stage's parts by number, of so many in all. Without the shapes of their ends torch would find
        these out by a training pass over memory that nobody has written to."""
        self._world, self._passes = world, list[Passes]()
        self._numbers = torch.arange(micro_batches).split(1 if order == "sequential" else micro_batches)
        self._parts = [self._part(part, parts, ends) for part, ends in own.items()]
        one: Any = Schedule1F1B if order == "interleaved" else ScheduleGPipe
        several: Any = ScheduleInterleaved1F1B if order == "interleaved" else ScheduleLoopedBFS
        schedule, stages = (one, self._parts[0]) if len(own) == 1 else (several, self._parts)
        # Losses and gradients are sums.
        self._schedule = schedule(stages, len(self._numbers[0]), loss_fn=self._loss, scale_grads=False)

    def _part(self, part: int, parts: int, ends: Ends) -> _Part:
        taken, given = (tuple(_meta(shape) for shape in shapes) for shapes in ends)
        forward, world = _Module(partial(self._forward, part)), self._world
        return _Part(forward, part, parts, world.device, taken, given, group=world.stage_group)

    def step(self, passes: Passes, times: StageTimes | None = None) -> None:
        """Take all micro-batches through; if anybody asks, note when."""
        self._passes.append(passes)
        for part in self._parts:
            part.times = times
        try:
            with times.noting(times.steps) if times else nullcontext():
                for numbers in self._numbers:
                    if fault := self._world.checked(self._run, numbers):
                        raise fault
        finally:
            self._passes.clear()
            for part in self._parts:
                part.clear_runtime_states()

    def _run(self, numbers: Tensor) -> BaseException | None:
        """Run the schedule; gives what went wrong in this stage's own passes, around which torch puts a fault."""
        try:
            self._schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as fault:
            if fault.__cause__ is None:
                raise
            return fault.__cause__
        return None

    def _forward(self, part: int, *carried: Tensor, number: Tensor) -> Any:
        return self._passes[0].forward(part, int(number), *carried)

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        return self._passes[0].loss(output, int(number))


class _Part(PipelineStage):
    """A part of the network, whose passes can be timed."""

    times: StageTimes | None = None

    def forward_one_chunk(self, *words: Any, **options: Any) -> Any:
        with self._timed():
            return super().forward_one_chunk(*words, **options)

    def backward_one_chunk(self, *words: Any, **options: Any) -> Any:
        with self._timed():
            return super().backward_one_chunk(*words, **options)

    def _timed(self) -> AbstractContextManager[None]:
        return self.times.noting(self.times.passes) if self.times else nullcontext()


class _Module(nn.Module):
    """A forward pass through a part, as torch wants it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *carried: Tensor, number: Tensor) -> Any:
        return self._function(*carried, number=number)


def _meta(shape: TensorShape) -> Tensor:
    """What stands for a tensor that a gradient comes back for."""
    return torch.empty(shape.size, dtype=shape.dtype, device="meta", requires_grad=True)
