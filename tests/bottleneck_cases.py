"""Residual bottlenecks and stems, and all that they compute, for the tests of their fused forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.model.batch import Batch
from paceline.model.layers import MakeNorm
from paceline.model.norm import SharedStatistics, Statistics
from paceline.model.resnet import ResidualShape, ResidualUnit, Stem
from paceline.settings.recipe import BatchNorm
from replicas_made import Circle, in_threads

M = TypeVar("M", bound=nn.Module)

NORM = MakeNorm(BatchNorm(name="batch"))


def ready(module: M) -> M:
    """A module in float64 and channels-last order, whose norms have scales and shifts of all sizes."""
    module.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def make_unit(inputs: int, width: int, stride: int = 1, groups: int = 1) -> ResidualUnit:
    """A bottleneck, with a projection where it changes the shape; its 3x3 convolution has so many groups."""
    return ready(ResidualUnit(inputs, width, stride, ResidualShape(True, False, "projection", groups), NORM))


def make_stem(outputs: int = 64) -> Stem:
    """The stem for large images."""
    return ready(Stem(3, outputs, True, NORM))


def pictures(images: int, channels: int, side: int) -> Tensor:
    """Images as a ReLU leaves them, in float64 and channels-last order."""
    x = torch.randn(images, channels, side, side, dtype=torch.float64)
    return x.relu_().contiguous(memory_format=torch.channels_last)


def same_numbers(y: Tensor) -> Tensor:
    """Normal numbers, the same ones for all tensors of a shape, in the type of this one."""
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return drawn.to(y).contiguous(memory_format=torch.channels_last)


def passes(
    module: nn.Module,
    forward: Callable[[Tensor, Batch], Tensor],
    x: Tensor,
    groups: int = 1,
    shared: SharedStatistics | None = None,
    dy: Tensor | None = None,
) -> list[Tensor]:
    """Output, statistics, the gradient of x where x > 0 unless it has none, and those of all parameters."""
    statistics = Statistics(module, 1, groups, shared)
    images = x.shape[1] == 3
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(not images)
    y = forward(x, Batch(statistics.pass_rows(0), slots=statistics.slots(0)))
    inputs: Sequence[Any] = [*([] if images else [x]), *module.parameters()]
    first, *rest = torch.autograd.grad(y, inputs, same_numbers(y) if dy is None else dy)
    return [y.detach(), statistics.collect().clone(), first if images else first * (x > 0), *rest]


def passes_of_replicas(
    module: M, form: Callable[[M, Tensor, Batch], Tensor], x: Tensor, dy: Tensor, count: int = 2
) -> list[Tensor]:
    """The same of replicas that share one norm group and the images: put together, or added up."""
    circle, results = Circle(count), [list[Tensor]() for _ in range(count)]
    modules = [deepcopy(module) for _ in range(count)]

    def work(replica: int) -> None:
        own = modules[replica]
        own_x, own_dy = (t.chunk(count)[replica].contiguous(memory_format=torch.channels_last) for t in (x, dy))
        results[replica] = passes(own, partial(form, own), own_x, 1, circle.seat(replica), own_dy)

    in_threads(count, work)
    y, statistics, dx, *rest = zip(*results, strict=True)
    sums = [torch.stack(each).sum(0) for each in (statistics, *rest)]
    return [torch.cat(y), sums[0], torch.cat(dx), *sums[1:]]


def distance(ours: Tensor, exact: Tensor) -> float:
    """How far one tensor is from another, in units of that one's length."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def assert_equal_to_rounding(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Both are the same numbers in float64, but for rounding."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype == torch.float64
        assert one.shape == other.shape
        assert distance(one, other) < 1e-12
