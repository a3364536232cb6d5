"""From 8-bit pictures to what the network sees, on the device: policy, color, side, normalization, emptied boxes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline import schedule
from paceline.augment import crop, policy
from paceline.augment.color import adjust, exact_mean
from paceline.augment.policy_ops import apply, inside
from paceline.planning import Plan


class Pixels:
    """Normalizes pictures, and before that, in training, changes them as the recipe says."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        color = torch.tensor([plan.data.mean, plan.data.std], dtype=torch.float64) * 255
        self._mean, self._spread = (row.view(-1, 1, 1).to(device, dtype) for row in color)

    def plain(self, pictures: Tensor) -> Tensor:
        """Pictures as numbers around zero."""
        numbers = pictures.to(self._dtype)
        made: Tensor
        match self._plan.data.normalize:
            case "mean-std":
                made = (numbers - self._mean) / self._spread
            case "mean":
                made = numbers - self._mean
            case "unit":
                made = numbers / 127.5 - 1
            case "image":
                made = standardized(numbers)
        return made

    def changed(self, pictures: Tensor, first: int) -> Tensor:
        """Training pictures, changed and normalized; the first stands at position `first` of the endless list."""
        recipe = self._plan.recipe
        wanted = recipe.augment
        positions = np.arange(first, first + len(pictures), dtype=np.int64)
        if wanted.policy is not None:
            layers = policy.draw(recipe, positions, pictures.shape[2])
            pictures = apply(pictures, layers, wanted.policy.fill, wanted.policy.sampling == "bilinear")
        if wanted.color.active:
            drawn = self._put(crop.colors(recipe, positions))
            pictures = adjust(pictures.to(self._dtype), drawn, wanted.color.turns)
        side = schedule.side(self._plan, first // self._plan.global_batch)
        if side != pictures.shape[2]:
            pictures = F.interpolate(pictures.to(self._dtype), (side, side), mode="bilinear", antialias=True)
        images = self.plain(pictures)
        if wanted.erase.probability or wanted.cutout:
            edges = self._put(crop.boxes(recipe, positions, side))
            empty = inside(edges[:4], images) | inside(edges[4:], images)
            images = torch.where(empty, 0, images)
        return images.contiguous(memory_format=torch.channels_last)

    def _put(self, numbers: NDArray[np.float64]) -> Tensor:
        """Numbers of the host on the device, without waiting for it."""
        host = torch.from_numpy(numbers).to(self._dtype)
        host = host.pin_memory() if self._device.type == "cuda" else host
        return host.to(self._device, non_blocking=True)


def standardized(numbers: Tensor) -> Tensor:
    """Each picture less its mean and divided by its spread, which counts as at least 1 / root of its numbers."""
    distance = numbers - exact_mean(numbers, (1, 2, 3))
    spread = exact_mean(distance * distance, (1, 2, 3)).sqrt()
    return distance / spread.clamp(min=numbers[0].numel() ** -0.5)
