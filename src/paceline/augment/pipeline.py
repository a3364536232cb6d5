"""All augmentations of a recipe in their order, split into what the host draws and what the device computes.

An augmentation is a function that draws its numbers on the host, by seed and position alone, and one that applies them
to a batch on the device. A new one is a line in BEFORE_NORMALIZE or AFTER_NORMALIZE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import schedule
from paceline.augment.color import adjust_color, draw_color
from paceline.augment.erase import draw_cutout, draw_erase, zero_boxes
from paceline.augment.mix import draw_mix, mix, mixed_labels
from paceline.augment.normalize import Normalize
from paceline.augment.policy import draw_policy
from paceline.augment.policy_ops import PolicyDraws, apply_policy
from paceline.device import float_dtype, pinned
from paceline.numpy_types import Float64s, Int64s
from paceline.planning import Plan
from paceline.settings.augment import Augment
from paceline.settings.data import Files
from paceline.settings.recipe import Recipe


class Operation(NamedTuple):
    """An augmentation of a batch of float images."""

    draw: Callable[[Recipe, Int64s, int], Float64s | None]
    """Numbers (a column for each position) for images of so many pixels a side; None where the recipe has no such."""
    apply: Callable[[Augment, Tensor, Tensor], Tensor]
    """Images with those numbers applied."""


BEFORE_NORMALIZE = {"color": Operation(draw_color, adjust_color)}
"""On pixels from 0 to 255, before the image side changes."""
AFTER_NORMALIZE = {"erase": Operation(draw_erase, zero_boxes), "cutout": Operation(draw_cutout, zero_boxes)}
_DRAWN = {name: operation.draw for name, operation in (BEFORE_NORMALIZE | AFTER_NORMALIZE).items()} | {"mix": draw_mix}


@dataclass(frozen=True)
class Draws:
    """Every number that the host draws for a micro-batch."""

    side: int
    """Pixels a side of the images that the network sees."""
    policy: PolicyDraws | None
    numbers: dict[str, Tensor]
    """For each augmentation of the recipe its numbers, a column for each image."""

    def to(self, device: torch.device) -> Draws:
        """The same draws on the device, without waiting for the copy."""
        moved = {name: numbers.to(device, non_blocking=True) for name, numbers in self.numbers.items()}
        return Draws(self.side, self.policy and self.policy.to(device), moved)


def draw_each(plan: Plan, batches: list[Int64s], device: torch.device) -> list[Draws]:
    """What is drawn for each of several micro-batches by their positions, in memory that the device can copy from;
    together where they have one image side, which is faster."""
    draws: list[Draws] = []
    for side, group in groupby(batches, lambda positions: training_side(plan, positions)):
        draws += _draw_alike(plan, list(group), side, device)
    return draws


def training_side(plan: Plan, positions: Int64s) -> int:
    """Pixels a side of the training images at these positions, which belong to one step."""
    return schedule.side(plan, int(positions[0]) // plan.global_batch)


def _draw_alike(plan: Plan, batches: list[Int64s], side: int, device: torch.device) -> list[Draws]:
    """Draws of micro-batches with the same image side."""
    positions, sizes = np.concatenate(batches), [len(batch) for batch in batches]
    loaded_side = side if isinstance(plan.data, Files) else plan.facts.side  # files are decoded to their final size
    layers = draw_policy(plan.recipe, positions, loaded_side)
    layers_each = zip(*(layer.split(sizes) for layer in layers), strict=True) if layers else [()] * len(batches)
    numbers: list[dict[str, Tensor]] = [{} for _ in batches]
    for name, draw_numbers in _DRAWN.items():
        drawn = draw_numbers(plan.recipe, positions, loaded_side if name in BEFORE_NORMALIZE else side)
        if drawn is not None:
            pieces = np.split(drawn, np.cumsum(sizes)[:-1], axis=1)
            for one, piece in zip(numbers, pieces, strict=True):
                one[name] = pinned(torch.tensor(piece, dtype=float_dtype(plan)), device)
    policies = [PolicyDraws.of(list(layers), device) for layers in layers_each]
    return [Draws(side, policy, one) for policy, one in zip(policies, numbers, strict=True)]


class Augmentation:
    """Turns 8-bit training images on the device into what the network sees."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._augment, self._block, self._dtype = plan.recipe.augment, plan.recipe.mix.block, float_dtype(plan)
        self.normalize = Normalize(plan.data).to(device, self._dtype)

    def prepare(self, images: Tensor, draws: Draws) -> Tensor:
        """8-bit images after the policy, the one augmentation that a CUDA graph cannot hold."""
        if draws.policy is None:
            return images
        assert self._augment.policy is not None
        return apply_policy(self._augment.policy, images, draws.policy)

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor | None]:
        """Prepared images after all other augmentations, normalized; their labels, and the labels' weights where images
        are mixed."""
        images = self.unmixed(images, draws)
        if "mix" not in draws.numbers:
            return images, labels, None
        return mix(images, labels, draws.numbers["mix"], self._block)

    def labels(self, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor | None]:
        """The labels of augmented images and their weights, as a stage has them that does not see the images."""
        if "mix" not in draws.numbers:
            return labels, None
        return mixed_labels(labels, draws.numbers["mix"].to(self._dtype), draws.side**2, self._block)

    def unmixed(self, images: Tensor, draws: Draws) -> Tensor:
        """Prepared images after all other augmentations but mixing, normalized: what is done to each image alone."""
        for name, operation in BEFORE_NORMALIZE.items():
            if name in draws.numbers:
                images = operation.apply(self._augment, images.to(self._dtype), draws.numbers[name])
        if draws.side != images.shape[2]:
            size = (draws.side, draws.side)
            images = F.interpolate(images.to(self._dtype), size, mode="bilinear", antialias=True)
        images = self.normalize(images)
        for name, operation in AFTER_NORMALIZE.items():
            if name in draws.numbers:
                images = operation.apply(self._augment, images, draws.numbers[name])
        return images.contiguous(memory_format=torch.channels_last)
