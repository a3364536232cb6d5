"""Chooses the fastest of several ways to compute the same on a CUDA device, measured once for each shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from math import inf

import torch
from torch import Tensor

from paceline.model.kernels.ahead import is_noting

REPEATS = 10
"""How often a way is taken in one measurement."""
MEASUREMENTS = 3
_chosen: dict[Hashable, int] = {}


def fastest(shape: Hashable, ways: Sequence[Callable[[], Tensor]]) -> Tensor:
    """What the ways give, by the fastest; by the first where the choice must not depend on a clock."""
    if len(ways) == 1 or torch.are_deterministic_algorithms_enabled():
        return ways[0]()
    if is_noting():  # nothing can be measured, but the programs of all ways will be launched
        for way in ways[1:]:
            with suppress(Exception):
                way()
        return ways[0]()
    if shape not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return ways[0]()
        times = [_milliseconds(way) for way in ways]
        _chosen[shape] = times.index(min(times))
    return ways[_chosen[shape]]()


def _milliseconds(way: Callable[[], Tensor]) -> float:
    """How long a way takes the device, without the host's launches; infinity if it cannot be taken."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    times: list[float] = []
    try:
        with torch.cuda.stream(side):
            way()  # compiles it, and lets libraries choose their kernels
            side.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(REPEATS):
                    way()
            finally:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a graph that is empty, because memory ran out in a way
                    graph.capture_end()
            for _ in range(MEASUREMENTS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
    except Exception:  # noqa: BLE001 - this device or version has not got it, which Triton says by faults of its own
        return inf
    finally:
        current.wait_stream(side)
    return min(times)
