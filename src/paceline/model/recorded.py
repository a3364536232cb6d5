"""Functions of a tensor as CUDA graphs: recorded once for each shape, then replayed without the host's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class RecordedPass(NamedTuple):
    """A graph, where it finds its argument, and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    argument: Tensor
    result: Tensor


class Recorded:
    """Gives what a function gives; from the second time that a shape comes, by a graph.

    The first time chooses kernels, which a recording cannot. A function that cannot be recorded is called.
    """

    fault: str | None = None
    """Why some shape could not be recorded."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: dict[object, RecordedPass | None] = {}
        self._seen: set[object] = set()

    def __call__(self, argument: Tensor) -> Tensor:
        shape = argument.shape, argument.stride(), argument.dtype
        if shape not in self._seen:
            self._seen.add(shape)
            return self._called(argument)
        if shape not in self._recordings:
            self._recordings[shape] = self._record(argument)
        recording = self._recordings[shape]
        if recording is None:
            return self._called(argument)
        recording.argument.copy_(argument)
        recording.graph.replay()
        return recording.result.clone()  # the next replay overwrites it

    def _called(self, argument: Tensor) -> Tensor:
        """The result, computed on the stream that recordings use, so that what torch prepares there serves them."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._function(argument)
        current.wait_stream(self._stream)
        return result

    def _record(self, argument: Tensor) -> RecordedPass | None:
        graph, own, current = torch.cuda.CUDAGraph(), argument.clone(), torch.cuda.current_stream()
        try:
            # Loader threads go on pinning memory, which a capture of the whole process would refuse.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = self._function(own)
        except RuntimeError as fault:
            torch.cuda.set_stream(current)  # which a capture that cannot end leaves behind
            self.fault = str(fault).partition("\n")[0]
            return None
        return RecordedPass(graph, own, result)
