"""How much of the exchange of gradients is hidden behind the backward pass: a trace of two replicas on one machine.

Each bucket's exchange begins when its gradients are there and it has been started, and ends when its sums have come
back; what lies before the end of the backward pass is hidden. The same steps without buckets that leave early are timed
for comparison, in turns.

    torchrun --nproc-per-node 2 benchmarks/exchange_overlap.py --device cuda --micro-batch 256
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.load.batches import MicroBatch
from paceline.job import plan_job
from paceline.launch import launched
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override, parse
from paceline.settings.recipe import Recipe
from paceline.training.session import Session, open_session
from paceline.training.state import broadcast_state, initialize_state
from paceline.training.step import take_step
from paceline.world import Work

PAGE = """
data: {name: generated, images: 4096, validation_images: 8, classes: 1000, side: 224}
epochs: 100
evaluate: {every: never}
report: 1000 epochs
schedule: constant
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
"""


class Clock:
    """Says on the host's clock when something was done, here or on the device, in seconds since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._first = device.type == "cuda", self._mark(device)
        self._start = time.perf_counter()

    @staticmethod
    def _mark(device: torch.device) -> torch.cuda.Event | None:
        if device.type != "cuda":
            return None
        torch.cuda.synchronize()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def now(self) -> float:
        return time.perf_counter() - self._start

    def event(self) -> torch.cuda.Event | float:
        """The moment at which the device has done what it was asked to so far."""
        if not self._cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event | float) -> float:
        if isinstance(moment, float):
            return moment
        assert self._first is not None
        milliseconds: float = self._first.elapsed_time(moment)
        return milliseconds / 1000


@dataclass
class Exchange:
    """One bucket's way."""

    bytes: int
    started: float
    ready: torch.cuda.Event | float
    done: float = 0.0


@contextmanager
def traced(session: Session) -> Iterator[tuple[Clock, list[Exchange], list[Any]]]:
    """While this is entered, note the exchange of each bucket and the end of each backward pass."""
    clock, exchanges, ends = Clock(session.world.device), list[Exchange](), list[Any]()
    network, start_sum = session.state.network, session.world.all_reduce_async
    passes = network.forward_backward

    def all_reduce_async(values: Tensor, on_host: bool = False) -> Work:
        work = start_sum(values, on_host)
        if not on_host:
            exchange = Exchange(values.nbytes, clock.now(), clock.event())
            exchanges.append(exchange)
            work.handle.get_future().add_done_callback(lambda _: setattr(exchange, "done", clock.now()))
        return work

    def forward_backward(*arguments: Any, **options: Any) -> Tensor:
        sums = passes(*arguments, **options)
        ends.append(clock.event())
        return sums

    world: Any = session.world
    world.all_reduce_async, network.forward_backward = all_reduce_async, forward_backward  # type: ignore[method-assign]
    try:
        yield clock, exchanges, ends
    finally:
        del world.all_reduce_async, network.forward_backward


@contextmanager
def leaving_late(session: Session) -> Iterator[None]:
    """While this is entered, every bucket leaves after the backward pass."""
    buckets: Any = session.state.network._buckets
    enclose = buckets.micro_batches
    buckets.micro_batches = lambda count: enclose(count + 1)  # the gradients of the last one never come
    try:
        yield
    finally:
        del buckets.micro_batches


def make_plan(model: str, micro_batch: int, device: str, precision: str) -> Plan:
    launch = launched()
    assert launch is not None, "start it with torchrun --nproc-per-node 2"
    tree = parse(f"model: {model}\nnorm_batch: {micro_batch}\n{PAGE}", "exchange_overlap")
    override(tree, f"global_batch={launch.count * micro_batch}", Recipe)
    words = {"device": device, "precision": precision, "micro_batch": micro_batch, "replicas": launch.count}
    placed = Tree(dict(words), {(): "here"})
    return plan_job("exchange_overlap", build(Recipe, tree), build(Placement, placed), None, tree, placed).plan


def timed_step(session: Session, batches: list[MicroBatch]) -> float:
    """Milliseconds of a step, from a barrier until the device has done it."""
    session.world.barrier()
    start = time.perf_counter()
    take_step(session, batches)
    if session.world.device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def trace(session: Session, batches: list[MicroBatch]) -> tuple[list[str], float]:
    """The lines of one step's trace, and the share of the exchange that is hidden."""
    session.world.barrier()
    with traced(session) as (clock, exchanges, ends):
        take_step(session, batches)
        if session.world.device.type == "cuda":
            torch.cuda.synchronize()
        end = clock.seconds(ends[0])
    lines, whole, hidden, busy_until = [], 0.0, 0.0, 0.0
    for number, exchange in enumerate(exchanges):
        begin = max(exchange.started, clock.seconds(exchange.ready))
        name = f"bucket {number + 1}" if number < len(exchanges) - 1 else "sums"
        times = f"{1000 * begin:8.1f} to {1000 * exchange.done:8.1f} ms"
        lines.append(f"  {name:10} {exchange.bytes / 1e6:6.1f} MB  {times}")
        begin = max(begin, busy_until)  # of exchanges at the same time, each moment counts once
        busy_until = max(busy_until, exchange.done)
        whole += max(0.0, exchange.done - begin)
        hidden += max(0.0, min(exchange.done, end) - begin)
    return [f"backward pass ends at {1000 * end:.1f} ms", *lines], hidden / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    plan = make_plan(arguments.model, arguments.micro_batch, arguments.device, arguments.precision)
    with tempfile.TemporaryDirectory() as folder, open_session(plan, Path(folder), launch=launched()) as session:
        if session.world.first:
            initialize_state(session.state, plan)
        broadcast_state(session.world, session.state)
        early, late, shares, lines = list[float](), list[float](), list[float](), list[str]()
        with closing(session.loader.training(0)) as steps:
            for _ in range(2):
                take_step(session, next(steps))
            for _ in range(arguments.turns):
                early.append(timed_step(session, next(steps)))
                with leaving_late(session):
                    late.append(timed_step(session, next(steps)))
                lines, share = trace(session, next(steps))
                shares.append(share)
        if session.world.first:
            print(f"{arguments.model}, {plan.replicas} replicas of {plan.micro_batch} images, {plan.placement.device}")
            print("\n".join(lines))
            print(f"hidden behind the backward pass: {', '.join(f'{share:.0%}' for share in shares)}")
            print(
                f"a step: {statistics.median(early):.0f} ms; {statistics.median(late):.0f} ms if nothing leaves early"
            )


if __name__ == "__main__":
    main()
