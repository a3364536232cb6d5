"""State that is on the device only while it is used: the same bits, room for two pieces, and no race between copies.

The CPU plays the device here. Its copies are done at once, so streams and events are played too: they keep vector
clocks, by which an access that is not ordered after those before it is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optim_cases import BAD, GOOD, MANY, OPTIMIZERS, RATES, everything, parameters, plan_of, steps, take_step
from paceline.optim import build
from paceline.optim.build import Optimizer, build_optimizer
from paceline.optim.flat import ParameterGroup
from paceline.optim.offload import HostGroup, Lane
from paceline.optim.parts import GroupPart, in_pieces
from paceline.optim.rule import FlatOptimizer
from paceline.optim.sgd import SgdRule
from paceline.optim.shard import ShardedOptimizer
from paceline.planning import Plan
from replicas_made import Circle, ThreadWorld, in_threads

ADAM = "{name: adamw, lr: 0.2}"
CPU = torch.device("cpu")
SMALL_PIECES = 500
BAD_STEP = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PIECE_BYTES", SMALL_PIECES)


def offloading(plan: Plan, **changes: str) -> Plan:
    return replace(plan, placement=plan.placement.model_copy(update={"offload": "optimizer", **changes}))


def learned(plan: Plan, dtype: torch.dtype = torch.float64, world: Any = None) -> tuple[dict[str, Any], Optimizer]:
    weights = {name: torch.nn.Parameter(p.detach().to(dtype)) for name, p in parameters(MANY).items()}
    optimizer = build_optimizer(weights.items(), plan, world=world)
    for step, _ in enumerate(steps(weights, len(RATES))):
        take_step(optimizer, RATES[step], 3.0, BAD if step == BAD_STEP else GOOD, step)
    return weights, optimizer


def lane_of(optimizer: Optimizer) -> Lane:
    assert isinstance(optimizer, FlatOptimizer)
    [lane] = {group._lane for group in optimizer._groups if isinstance(group, HostGroup)}
    return lane


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [(torch.float64, "{}"), (torch.bfloat16, "{value: 0.5, norm: 0.7, adaptive: 0.1}")],
    ids=["wide", "narrow"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_on_the_host_changes_no_bit(optimizer: str, dtype: torch.dtype, clip: str) -> None:
    plan = plan_of(optimizer, "weight_decay.rate=0.1", f"clip={clip}", shapes=MANY)
    here, there = (everything(*learned(each, dtype)) for each in (plan, offloading(plan)))
    assert here.keys() == there.keys()
    for name, values in here.items():
        # On a CPU the kernel of SGD may round the last few numbers of a parameter otherwise.
        limit = 0
        assert torch.allclose(values, there[name], rtol=limit, atol=limit), name


def test_the_device_has_room_for_two_pieces() -> None:
    _, optimizer = learned(offloading(plan_of(ADAM, shapes=MANY)))
    lane = lane_of(optimizer)
    sizes = [piece.nbytes for piece in lane._pieces]
    assert len(sizes) > 3
    assert sum(sizes) == 2 * 8 * sum(-(-torch.Size(shape).numel() // 64) * 64 for shape in MANY.values())
    assert [room.nbytes for room in lane._rooms] == [max(sizes[::2]), max(sizes[1::2])]
    assert not lane._there


def test_shares_may_be_on_the_host_too() -> None:
    plan, circle, left = plan_of(ADAM, shapes=MANY), Circle(2), list[dict[str, Tensor]]([{}, {}])
    whole = everything(*learned(plan))

    def work(replica: int) -> None:
        weights, optimizer = learned(offloading(plan, shard="optimizer"), world=ThreadWorld(circle, replica))
        assert isinstance(optimizer, ShardedOptimizer)
        with optimizer.gathered():
            left[replica] = everything(weights, optimizer)

    in_threads(2, work)
    for tensors in left:
        assert whole.keys() == tensors.keys()
        assert all(torch.equal(values, tensors[name]) for name, values in whole.items())


def test_pieces_follow_the_flat_order_and_cut_no_stack() -> None:
    group = ParameterGroup(0.0, 1.0, parameters({"a": (64,), "b": (2, 64), "c": (64,), "d": (64,), "e": (2, 64)}))
    part = GroupPart(group, SgdRule(0.9, nesterov=False))
    for stacked, names in ((False, [["b"], ["e"], ["a", "c"], ["d"]]), (True, [["b", "e"], ["a", "c", "d"]])):
        pieces = in_pieces([replace(part, stacked=stacked)], 2 * 64 * 8)
        assert [sorted(piece.group.parameters) for piece in pieces] == names


Clock = dict[str, int]


@dataclass
class PlayedStream:
    name: str
    clock: Clock = field(default_factory=dict)

    def join(self, clock: Clock) -> None:
        self.clock = {name: max(self.clock.get(name, 0), clock.get(name, 0)) for name in self.clock | clock}

    def wait_stream(self, other: PlayedStream) -> None:
        self.join(other.clock)


class PlayedDevice:
    """What Lane needs of torch.cuda, with vector clocks."""

    def __init__(self, ignored: int | None = None) -> None:
        """With `ignored`, the event of this number orders nothing, as if it were forgotten."""
        self.streams, self.events, self.ignored = [PlayedStream("main")], 0, ignored
        self.host = PlayedStream("host")

    def Stream(self) -> PlayedStream:  # noqa: N802
        self.streams.append(PlayedStream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def Event(self) -> PlayedEvent:  # noqa: N802
        self.events += 1
        return PlayedEvent(self, self.events - 1 == self.ignored)

    def current_stream(self) -> PlayedStream:
        return self.streams[0]

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        self.streams.insert(0, stream)
        try:
            yield
        finally:
            self.streams.pop(0)


class PlayedEvent:
    def __init__(self, device: PlayedDevice, ignored: bool) -> None:
        self._device, self._ignored, self._clock = device, ignored, Clock()

    def record(self, stream: PlayedStream) -> None:
        self._clock = dict(stream.clock)

    def wait(self, stream: PlayedStream) -> None:
        if not self._ignored:
            stream.join(self._clock)

    def synchronize(self) -> None:
        self.wait(self._device.host)


class Races(TorchDispatchMode):
    """Finds accesses of a lane's tensors that are not ordered after those they could meet."""

    def __init__(self, device: PlayedDevice, lane: Lane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._lane = device, lane
        self._accesses: dict[int, list[tuple[str, int, bool]]] = {}
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, names = self._device.current_stream(), function._schema.arguments
        stream.join(self._device.host.clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        watched = {tensor.untyped_storage().data_ptr() for tensor in (*self._lane._pieces, *self._lane._rooms)}
        given = [*zip(names, args, strict=False), *((n, kwargs[n.name]) for n in names if kwargs and n.name in kwargs)]
        for argument, value in given:
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and (place := tensor.untyped_storage().data_ptr()) in watched:
                    self._access(place, stream, bool(argument.alias_info and argument.alias_info.is_write))
        return function(*args, **(kwargs or {}))

    def _access(self, place: int, stream: PlayedStream, writes: bool) -> None:
        self.seen += 1
        for name, count, wrote in self._accesses.setdefault(place, []):
            if (writes or wrote) and name != stream.name and stream.clock.get(name, 0) < count:
                self.found.append(f"{stream.name} meets {name}")
        self._accesses[place].append((stream.name, stream.clock[stream.name], writes))


def races(monkeypatch: pytest.MonkeyPatch, optimizer: str, pieces: int, ignored: int | None = None) -> Races:
    """What is found in a few steps of an optimizer whose state travels in so many pieces."""
    shapes = {f"{index}.weight": (64 + 64 * index,) for index in range(pieces)}
    device = PlayedDevice(ignored)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    weights = parameters(shapes)
    ours = build_optimizer(weights.items(), offloading(plan_of(optimizer, "clip.value=9", shapes=shapes)))
    lane = lane_of(ours)
    assert len(lane._pieces) == pieces
    watch = Races(device, lane)
    for _ in steps(weights, 3):
        with watch:
            take_step(ours, 0.1, 2.0)
    device.streams.insert(0, device.host)  # between steps the host may read the state, and change it
    with watch:
        for tensor in ours.tensors().values():
            tensor.mul_(1)
    device.streams.pop(0)
    for _ in steps(weights, 2):
        with watch:
            take_step(ours, 0.1, 2.0)
    return watch


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("optimizer", [ADAM, "{name: lars, lr: 0.1, skip_dimensions: []}"])
def test_no_copy_meets_another_or_the_update(monkeypatch: pytest.MonkeyPatch, optimizer: str, pieces: int) -> None:
    watch = races(monkeypatch, optimizer, pieces)
    assert watch.seen > 20 * pieces
    assert watch.found == []


@pytest.mark.parametrize("ignored", range(4))
def test_every_event_is_needed(monkeypatch: pytest.MonkeyPatch, ignored: int) -> None:
    assert races(monkeypatch, ADAM, 5, ignored).found
