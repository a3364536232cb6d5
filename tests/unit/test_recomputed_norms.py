"""Norms over replicas in a pass that is computed again: what was exchanged once is not exchanged twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_session
from paceline.model.kernels import bottleneck
from paceline.model.resnet import ResidualUnit
from replicas_made import Circle, Seat, in_threads

WORDS = ("norm_batch=8", "on.micro_batch=8", "on.precision=fp64")


@pytest.fixture(autouse=True)
def small_bottlenecks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bottlenecks of a small network are fused as those of a large one."""
    monkeypatch.setattr(bottleneck, "LANES", 16)
    monkeypatch.setattr(bottleneck, "ROWS_PER_CHANNEL", 0)


class Counted(Seat):
    """A place that counts what it takes part in."""

    gathered = summed = 0

    def all_gather(self, values: Tensor) -> Tensor:
        self.gathered += 1
        return super().all_gather(values)

    def all_reduce(self, values: Tensor) -> Tensor:
        self.summed += 1
        return super().all_reduce(values)


def passes(*words: str) -> tuple[list[Counted], list[dict[str, Tensor]]]:
    """The passes of a step on two replicas; gives their places, and what they leave."""
    circle = Circle(2)
    places, left = [Counted(circle, replica) for replica in (0, 1)], list[dict[str, Tensor]]()
    sessions = [make_session(make_plan(*WORDS, *words)) for _ in places]
    batches = [next(session.loader.training(0)) for session in sessions]

    def work(replica: int) -> None:
        network = sessions[replica].state.network
        for norm in network.statistics.norms:
            norm.shared = places[replica]
        network.forward_backward(batches[replica][replica : replica + 1])

    in_threads(2, work)
    for session in sessions:
        network = session.state.network
        gradients = {name: p.grad for name, p in network.module.named_parameters() if p.grad is not None}
        left.append({**gradients, "statistics": network.statistics.collect()})
    return places, left


@pytest.mark.parametrize(
    "words",
    [
        ("on.kernels=plain",),
        ("on.kernels=fused",),
        ("on.kernels=fused", "model={name: efficientnet-cifar, width: 0.25, depth: 0.5, survival: 1}", "data.side=16"),
        ("on.kernels=fused", "model=resnet11-bottleneck"),
        ("on.kernels=fused", "model=resnet18", "data.side=32"),
    ],
    ids=["plain", "fused", "squeeze", "bottleneck", "stem"],
)
def test_nothing_is_exchanged_twice_and_no_bit_changes(words: tuple[str, ...]) -> None:
    (plain, _), one = passes(*words)
    (again, _), other = passes(*words, "on.recompute=all")
    assert plain.gathered == again.gathered > 5
    assert plain.summed == again.summed > 5
    for kept, recomputed in zip(one, other, strict=True):
        assert kept.keys() == recomputed.keys()
        assert [name for name, values in kept.items() if not torch.equal(values, recomputed[name])] == []
    assert not all(torch.equal(values, one[1][name]) for name, values in one[0].items())


def test_fused_bottlenecks_compute_their_outputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, output = list[object](), bottleneck._output

    def counted(unit: ResidualUnit, *rest: Any) -> Tensor:
        computed.append(unit)
        return output(unit, *rest)

    monkeypatch.setattr(bottleneck, "_output", counted)
    for recompute, again in (("none", 0), ("all", 0), ("[stage3]", 1)):  # stage1 and stage2 are a piece then
        computed.clear()
        words = (*WORDS, "on.kernels=fused", "model=resnet11-bottleneck", f"on.recompute={recompute}")
        session = make_session(make_plan(*words))
        session.state.network.forward_backward(next(session.loader.training(0))[:1])
        assert len(computed) == 3 + again
        assert len(set(computed)) == 3
