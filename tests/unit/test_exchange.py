"""Gradients that leave in buckets during the backward pass, beside another replica whose gradients are played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import Broken
from paceline.model.exchange import GradientBuckets
from paceline.world import Work, World

OTHER = 100.0
"""What the other replica adds to every number."""


class Beside(World):
    """One of two replicas; the other's numbers are added when a collective is waited for."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__(torch.device("cpu"), 0, 2)
        self.sent: list[Tensor] = []
        self.broken = broken

    def all_reduce_async(self, values: Tensor, on_host: bool = False) -> Work:
        self.sent.append(values.clone())

        def wait() -> None:
            if self.broken and len(self.sent) == 4:
                raise Broken("replica 1 stopped answering")
            values.add_(OTHER)

        return Work(SimpleNamespace(wait=wait), self)


def layers() -> list[nn.Parameter]:
    """Three weights, each of which is a bucket of 8 bytes."""
    return [nn.Parameter(torch.tensor([float(i), 2.0])) for i in range(1, 4)]


def gradients(parameters: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_buckets_leave_in_the_last_micro_batch_while_it_runs() -> None:
    world, parameters = Beside(), layers()
    buckets = GradientBuckets(parameters, world, torch.float32, 8, torch.float32)
    order: list[int] = []
    with buckets.micro_batches(2):
        for _ in range(2):
            x = torch.ones(2)
            for parameter in parameters:
                x = x * parameter
                x.register_hook(lambda _: order.append(len(world.sent)))
            x.sum().backward()
    assert order == [0, 0, 0, 0, 1, 2]  # the second backward pass meets the last weight first, and sends it
    sums = buckets.finish(torch.tensor([7.0]))
    assert [row.tolist() for row in world.sent] == [[4, 8], [6, 8], [12, 8], [7]]
    assert gradients(parameters) == [[112, 108], [106, 108], [104, 108]]
    assert sums.tolist() == [107]


def test_a_bucket_that_is_full_early_waits_for_those_before_it() -> None:
    world, (first, second, third) = Beside(), layers()
    buckets = GradientBuckets([first, second, third], world, torch.float32, 8, torch.float32)
    with buckets.micro_batches(1):
        (first * 2 + second * 3).sum().backward()
        assert world.sent == []  # the third, which leaves first, has no gradient in this pass
    buckets.finish(torch.zeros(1))
    assert [row.tolist() for row in world.sent] == [[0, 0], [3, 3], [2, 2], [0]]
    assert gradients([first, second, third]) == [[102, 102], [103, 103], [100, 100]]


def test_a_replica_without_micro_batches_sends_zeros() -> None:
    world, parameters = Beside(), layers()
    GradientBuckets(parameters, world, torch.float32, 8, torch.float32).finish(torch.zeros(1))
    assert [row.tolist() for row in world.sent] == [[0, 0], [0, 0], [0, 0], [0]]
    assert gradients(parameters) == [[100, 100]] * 3


def test_gradients_are_dropped_if_another_replica_is_missing() -> None:
    parameters = layers()
    buckets = GradientBuckets(parameters, Beside(broken=True), torch.float32, 8, torch.float32)
    with buckets.micro_batches(1):
        torch.stack(list(parameters)).sum().backward()
    with pytest.raises(Broken):
        buckets.finish(torch.zeros(1))
    assert gradients(parameters) == [None] * 3


def test_gradients_are_dropped_if_a_pass_fails() -> None:
    world, parameters = Beside(), layers()
    buckets = GradientBuckets(parameters, world, torch.float32, 8, torch.float32)

    def passes() -> None:
        torch.stack(list(parameters)).sum().backward()
        raise Broken("replica 1 stopped answering")

    with pytest.raises(Broken), buckets.micro_batches(2):
        passes()
    assert gradients(parameters) == [None] * 3


def test_gradients_of_16_bit_weights_leave_in_32_bits_laid_out_as_the_weights() -> None:
    world = Beside()
    conv = nn.Conv2d(3, 4, 2).to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in conv.parameters():
        parameter.grad_dtype = torch.float32
    buckets = GradientBuckets(list(conv.parameters()), world, torch.float32, 1 << 20, torch.float32)
    with buckets.micro_batches(1):
        conv(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16)).sum().backward()
    buckets.finish(torch.zeros(1))
    assert [(row.dtype, len(row)) for row in world.sent] == [(torch.float32, 52), (torch.float32, 1)]
    for parameter in conv.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.dtype, parameter.grad.stride()) == (torch.float32, parameter.stride())
        assert parameter.grad.eq(101).all()


def test_a_single_replica_has_no_buckets() -> None:
    parameter = nn.Parameter(torch.ones(3))
    buckets = GradientBuckets([parameter], World(torch.device("cpu")), torch.float32, 8, torch.float32)
    with buckets.micro_batches(1):
        parameter.sum().backward()
    gradient = parameter.grad
    assert buckets.finish(torch.ones(1)).tolist() == [1]
    assert parameter.grad is gradient
    assert not parameter._post_accumulate_grad_hooks


def test_a_bucket_holds_as_much_as_is_asked_for() -> None:
    for size, sizes in ((0, [2, 2, 2]), (12, [4, 2]), (24, [6]), (1 << 50, [6])):
        world = Beside()
        GradientBuckets(layers(), world, torch.float32, size, torch.float32).finish(torch.zeros(1))
        assert [len(row) for row in world.sent] == [*sizes, 1]


def test_16_bit_communication_halves_the_bytes_and_gives_back_32_bits() -> None:
    world, parameters = Beside(), layers()
    buckets = GradientBuckets(parameters, world, torch.float32, 8, torch.bfloat16)
    with buckets.micro_batches(1):
        (sum(parameters, torch.zeros(2)) * 1.0001).sum().backward()
    sums = buckets.finish(torch.tensor([0.0001]))
    assert [row.dtype for row in world.sent] == [torch.bfloat16] * 3 + [torch.float32]
    assert gradients(parameters) == [[101, 101]] * 3  # 1.0001 is 1 to 8 bits
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [torch.float32] * 3
    assert sums.item() == pytest.approx(100.0001, abs=1e-5)
