"""What each block of a network keeps for its backward pass, passes on, and how long it takes, in passes of training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.data.load.batches import MicroBatch
from paceline.facts import Line, ProbedBlock
from paceline.training.session import Session
from paceline.training.step import begin_step
from paceline.training.stopwatch import wait_for

PASSES = 3
"""How often both passes are timed; the median counts."""


@dataclass(frozen=True)
class BlockPoint:
    """What one block took for a micro-batch of one size, in bytes and seconds."""

    kept: int
    passed: int
    working: int
    forward: float
    backward: float
    weights: int
    gradients: int
    optimizer: int


def block_points(session: Session, batch: MicroBatch) -> dict[str, BlockPoint]:
    """Take the passes of a micro-batch a few times, and look at each block; gradients and statistics are dropped."""
    (prepared,), scale = begin_step(session, [batch])
    network = session.state.network

    def take(counts: bool) -> _Passes:
        passes = _Passes(network.module, session.world.device)
        for parameter in network.parameters:
            parameter.grad = None
        with passes.watched(counts):
            network.forward_backward([prepared], scale)
        network.statistics.pop()
        return passes

    counted, *others = [take(number == 0) for number in range(1 + PASSES)]  # the first one also warms up
    wait_for(session.world.device)
    times = [passes.seconds() for passes in others]
    weights, gradients, optimizer = _sizes(session)
    return {
        name: BlockPoint(
            kept=counted.kept.get(name, 0),
            passed=counted.passed[name],
            working=max(passes.working(name) for passes in others),
            forward=median(seconds[name][0] for seconds in times),
            backward=median(seconds[name][1] for seconds in times),
            weights=weights.get(name, 0),
            gradients=gradients.get(name, 0),
            optimizer=optimizer.get(name, 0),
        )
        for name in network.module._modules
    }


def probed_blocks(
    less: dict[str, BlockPoint], more: dict[str, BlockPoint], sizes: tuple[int, int]
) -> list[ProbedBlock]:
    """The blocks of a probe, by what micro-batches of two sizes took."""
    return [
        ProbedBlock(
            name=name,
            weights=point.weights,
            gradients=point.gradients,
            optimizer=point.optimizer,
            kept=Line.through((sizes[0], less[name].kept), (sizes[1], point.kept)),
            passed=Line.through((sizes[0], less[name].passed), (sizes[1], point.passed)),
            working=Line.through((sizes[0], less[name].working), (sizes[1], point.working)),
            forward=point.forward / sizes[1],
            backward=point.backward / sizes[1],
        )
        for name, point in more.items()
    ]


def _sizes(session: Session) -> tuple[dict[str, int], ...]:
    """Bytes of weights, of gradients, and of what the optimizer and the moving average keep, by block."""
    state = session.state
    tensors = state.tensors()
    averages = {} if state.ema is None else state.ema.tensors()
    gradients = {name: p.grad for name, p in state.network.module.named_parameters() if p.grad is not None}
    sums: list[dict[str, int]] = []
    for groups in ([tensors["network"]], [gradients], [tensors["optimizer"], averages]):
        sizes: dict[str, int] = {}
        for name, tensor in [item for group in groups for item in group.items()]:
            block = name.partition(".")[0]
            sizes[block] = sizes.get(block, 0) + tensor.nbytes
        sums.append(sizes)
    return tuple(sums)


@dataclass
class _Passes:
    """A forward and a backward pass that are watched block by block, from outside."""

    module: nn.Module
    device: torch.device
    kept: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    _moments: dict[str, Any] = field(default_factory=dict)
    _memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """At each of these moments, bytes in tensors, and the most since the moment before; on CUDA."""
    _seen: dict[int, Any] = field(default_factory=dict)
    """Memory that was counted, which stays as long as this does, so that none is taken for other memory."""
    _block: str = ""

    @contextmanager
    def watched(self, counts: bool) -> Iterator[None]:
        """Watch the passes inside; where it `counts`, also what is kept, which takes time."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self._seen[tensor.untyped_storage()._cdata] = None
        hooks = []
        for name, block in self.module.named_children():
            hooks.append(block.register_forward_pre_hook(partial(self._on_input, name)))
            hooks.append(block.register_forward_hook(partial(self._on_output, name)))
        try:
            with saved_tensors_hooks(self._count, _as_it_is) if counts else nullcontext():
                yield
            self._mark("end")
        finally:
            for hook in hooks:
                hook.remove()
            self._seen.clear()

    def seconds(self) -> dict[str, tuple[float, float]]:
        """How long each block's forward and backward pass took, once the device is done."""
        found, until = dict[str, tuple[float, float]](), self._moments["end"]
        for name in self.module._modules:
            forward = self._between(self._moments[f"input {name}"], self._moments[f"output {name}"])
            given = self._moments.get(f"gradient {name}")  # a block has none that is frozen like all before it
            found[name] = forward, 0.0 if given is None else self._between(given, until)
            until = until if given is None else given
        return found

    def working(self, name: str) -> int:
        """What a block's backward pass took for a moment, with the gradient that came in; 0 where nobody knows."""
        moments = list(self._memory)
        given = f"gradient {name}"
        if given not in self._memory:
            return 0
        most = self._memory[moments[moments.index(given) + 1]][1]
        return most - self._memory[given][0] + self.passed[name]

    def _on_input(self, name: str, *_: object) -> None:
        self._block = name
        self._mark(f"input {name}")

    def _on_output(self, name: str, _block: nn.Module, _input: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._mark(f"output {name}")
        tensors = (output,) if isinstance(output, Tensor) else output
        self.passed[name] = sum(tensor.nbytes for tensor in tensors)
        if tensors[0].requires_grad:
            tensors[0].register_hook(lambda _: self._mark(f"gradient {name}"))

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.kept[self._block] = self.kept.get(self._block, 0) + storage.nbytes()
        return tensor

    def _mark(self, moment: str) -> None:
        if self.device.type != "cuda":
            wait_for(self.device)
            self._moments[moment] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._moments[moment] = event
        self._memory[moment] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self.device.type == "cuda" else float(end - begin)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
