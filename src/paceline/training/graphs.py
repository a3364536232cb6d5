"""Steps as CUDA graphs: recorded once for each shape of micro-batches, then replayed without the host's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.augment.pipeline import Draws
from paceline.data.load.batches import MicroBatch
from paceline.training.device_step import device_step, device_update
from paceline.training.gradients import GradientReader
from paceline.training.session import Session

WARM_STEPS = 2
"""Steps of a shape that are taken before one is recorded: they choose kernels, which a recording cannot."""


@dataclass
class Recording:
    """The graphs of a step, and the tensors that they read and leave behind."""

    batch: MicroBatch
    """Where the graphs find their micro-batch."""
    first: torch.cuda.CUDAGraph
    """The passes of the first micro-batch, which set the gradients."""
    following: torch.cuda.CUDAGraph | None
    """Those of each later one, which add to them."""
    reading: list[tuple[GradientReader, torch.cuda.CUDAGraph]]
    """What is computed from the gradients, only in steps of which it is wanted."""
    update: torch.cuda.CUDAGraph
    average: torch.cuda.CUDAGraph | None
    """What the EMA does after a step, only after those that it follows."""
    sums: Tensor
    """The step's TRAIN_SUMS."""
    first_sums: Tensor
    following_sums: Tensor
    bad: Tensor


class StepGraphs:
    """Takes the device's part of steps, recorded where the shape of the micro-batches has come before."""

    def __init__(self, session: Session) -> None:
        self._session, self._network = session, session.state.network
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[object, int] = {}
        self._recordings: dict[object, Recording | None] = {}

    def recorded_average(self, bad: Tensor) -> Callable[[], None] | None:
        """What lets the EMA follow the step that gave this flag, if that step was a recording."""
        recordings = (each for each in self._recordings.values() if each is not None and each.bad is bad)
        average = next((recording.average for recording in recordings), None)
        return None if average is None else average.replay

    def step(self, batches: list[MicroBatch], scale: Tensor) -> Tensor:
        """Forward, backward and update; gives the flag of a bad step."""
        shape = (len(batches) > 1, *_shape(batches[0]))
        if shape not in self._recordings:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= WARM_STEPS:
                return self._eager(batches, scale, self._session.gradient_readers)
            self._recordings[shape] = self._record(batches, scale)
        recording = self._recordings[shape]
        if recording is None:
            return self._eager(batches, scale, self._session.wanted_readers)
        return self._replay(recording, batches)

    def _eager(self, batches: list[MicroBatch], scale: Tensor, readers: list[GradientReader]) -> Tensor:
        """A step on the stream that recordings use, so that what torch prepares there serves them too."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            bad = device_step(self._session, batches, scale, readers)
        current.wait_stream(self._stream)
        return bad

    def _record(self, batches: list[MicroBatch], scale: Tensor) -> Recording | None:
        """Record a step, which does not take it; None where it holds something that cannot be recorded."""
        try:
            return self._recorded(batches, scale)
        except RuntimeError as fault:
            self._session.run.note(f"A step is not recorded as a CUDA graph: {str(fault).partition(chr(10))[0]}")
            for parameter in self._network.parameters:
                parameter.grad = None
            return None

    def _recorded(self, batches: list[MicroBatch], scale: Tensor) -> Recording:
        network, batch = self._network, _copy(batches[0])
        first, following, update = torch.cuda.CUDAGraph(), None, torch.cuda.CUDAGraph()
        with self._capture(first):
            first_sums = network.forward_backward([batch], scale)
        following_sums = first_sums
        if len(batches) > 1:
            following = torch.cuda.CUDAGraph()
            with self._capture(following):
                following_sums = network.forward_backward([batch], scale, begin=1)
        sums = first_sums.clone()
        reading = [(reader, torch.cuda.CUDAGraph()) for reader in self._session.gradient_readers]
        for reader, graph in reading:  # before the update, whose recording lets go of the gradients
            with self._capture(graph):
                reader.take(scale)
        with self._capture(update):
            norm_sums, all_sums = network.all_reduce(sums)
            bad = device_update(self._session, norm_sums, all_sums, scale)
        ema, average = self._session.state.ema, None
        if ema is not None:
            average = torch.cuda.CUDAGraph()
            with self._capture(average):
                ema.follow(bad)
        return Recording(batch, first, following, reading, update, average, sums, first_sums, following_sums, bad)

    def _capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Loader threads go on pinning memory, which a capture of the whole process would refuse.
        return torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")

    def _replay(self, recording: Recording, batches: list[MicroBatch]) -> Tensor:
        statistics = self._network.statistics
        for index, batch in enumerate(batches):
            _copy_into(recording.batch, batch)
            if index == 0:
                recording.first.replay()
                recording.sums.copy_(recording.first_sums)
            else:
                assert recording.following is not None
                recording.following.replay()
                recording.sums.add_(recording.following_sums)
                statistics.put_aside(index)
        statistics.put_back(len(batches))
        wanted = self._session.wanted_readers
        for reader, graph in recording.reading:
            if reader in wanted:
                graph.replay()
        recording.update.replay()
        return recording.bad


def _tensors(batch: MicroBatch) -> list[Tensor]:
    assert batch.positions is not None
    assert batch.draws is not None
    return [batch.images, batch.labels, batch.positions, *batch.draws.numbers.values()]


def _shape(batch: MicroBatch) -> tuple[object, ...]:
    """What two micro-batches have in common that one recording serves."""
    assert batch.draws is not None
    tensors = _tensors(batch)
    return batch.draws.side, *batch.draws.numbers, *((t.shape, t.stride(), t.dtype) for t in tensors)


def _copy(batch: MicroBatch) -> MicroBatch:
    assert batch.draws is not None
    assert batch.positions is not None
    numbers = {name: values.clone() for name, values in batch.draws.numbers.items()}
    draws = Draws(batch.draws.side, None, numbers)
    return replace(
        batch, images=batch.images.clone(), labels=batch.labels.clone(), positions=batch.positions.clone(), draws=draws
    )


def _copy_into(own: MicroBatch, batch: MicroBatch) -> None:
    for to, values in zip(_tensors(own), _tensors(batch), strict=True):
        to.copy_(values)
