"""Differences that a layout is given on purpose, and the part of a step where each must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.augment.pipeline import Augmentation
from paceline.model.dropout import DropoutMasks
from paceline.model.whole import Whole
from paceline.optim.build import Optimizer
from paceline.optim.rule import FlatOptimizer
from paceline.optim.sgd import FusedSgd
from paceline.planning import Plan
from paceline.training.session import Session
from paceline.training.trials import Trial

PLANTED = 1e-9


@torch.no_grad()
def shift(tensor: Tensor) -> None:
    """Add the planted difference to the first number of a tensor."""
    tensor[(0,) * tensor.dim()] += PLANTED * float(tensor.abs().max())


def in_gradient(network: Whole, given: Any) -> Any:
    gradient = next(p.grad for p in network.parameters if p.dim() > 1)
    assert gradient is not None
    shift(gradient)
    return given


def in_norm_sum(network: Whole, given: Any) -> Any:
    (_means,), (variances,) = network.statistics.norms[-1].columns(given[0][None])
    shift(variances)
    return given


def in_label(_augment: Augmentation, given: tuple[Tensor, Tensor, Tensor | None]) -> Any:
    images, labels, weights = given
    if weights is None:
        labels = labels.clone()
        labels[0] = (labels[0] + 1) % 10
        return images, labels, None
    weights = weights.clone()
    shift(weights)
    return images, labels, weights


def in_mask(_masks: DropoutMasks, given: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> Any:
    dropout, depth = given
    if not depth[0].is_meta:  # as where the work of blocks is counted
        shift(depth[0])
    return dropout, depth


def in_moment(optimizer: Optimizer, given: None) -> None:
    shift(next(tensor for tensor in optimizer.tensors().values() if tensor.dim() > 1))


def changed(method: Callable[..., Any], change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda owner, *words: change(owner, method(owner, *words))


@dataclass(frozen=True)
class Plant:
    """A difference that the following layout is given, and the part where it must show."""

    part: str
    methods: tuple[tuple[type, str], ...]
    change: Callable[[Any, Any], Any]
    """What becomes of a method's result."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in self.methods:
                patch.setattr(owner, name, changed(getattr(owner, name), self.change))
            yield


PLANTS = {
    "gradient": Plant("gradients", ((Whole, "all_reduce"),), in_gradient),
    "norm sum": Plant("norm_sums", ((Whole, "all_reduce"),), in_norm_sum),
    "label": Plant("inputs", ((Augmentation, "__call__"),), in_label),
    "moment": Plant("update", ((FusedSgd, "step"), (FlatOptimizer, "step")), in_moment),
    "mask": Plant("inputs", ((DropoutMasks, "__call__"),), in_mask),
}


class PlantedTrial(Trial):
    """A trial in which a difference is planted in one process."""

    plant, process = "", 0

    def _start(self, plan: Plan, task: Callable[[Session], None]) -> list[BaseProcess]:
        return super()._start(plan, partial(planted, self.plant, self.process, task))


def planted(plant: str, process: int, task: Callable[[Session], None], session: Session) -> None:
    """Run a process of a trial, with the difference if it is the one that has it."""
    if session.world.process == process and plant:
        with PLANTS[plant].planted():
            task(session)
    else:
        task(session)
