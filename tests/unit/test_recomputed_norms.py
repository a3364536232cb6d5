"""Norms over replicas in a pass that is computed again: what was exchanged once is not exchanged twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_session
from replicas_made import Circle, Seat, in_threads

WORDS = ("norm_batch=8", "on.micro_batch=8", "on.precision=fp64")


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
