"""Stochastic rounding to 16 bits: up or down by chance, with odds that make the mean exact; the chance is keyed."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import keyed

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""How many bits of a float32's fraction each type has no place for."""
_LEAST_HALF = 2.0**-14
"""The smallest float16 with a full fraction; below it the distance between neighbors stays 2^-24."""


def round_by_chance(wide: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """Float32 numbers as 16-bit ones: one of the two neighbors, the nearer the likelier; infinity and NaN stay.

    `words` holds 32 random bits for each number.
    """
    dropped = _DROPPED[dtype]
    noise = (words >> (32 - dropped)).to(torch.int32)
    # Sign and size are apart in a float's bits: adding noise below the last place that stays, then cutting off there,
    # carries into it as often as what is cut off is large.
    near = ((wide.view(torch.int32) + noise) & -(1 << dropped)).view(torch.float32)
    if dtype == torch.float16:
        places = wide.abs() * 2.0**24
        steps = places.floor()
        steps = steps + (places - steps > (words >> 8) * 2.0**-24)
        near = torch.where(wide.abs() < _LEAST_HALF, torch.copysign(steps * 2.0**-24, wide), near)
    return torch.where(wide.isfinite(), near, wide).to(dtype)


class Chances:
    """32 random bits for each of `count` numbers in every step; four numbers share one turn of the generator."""

    def __init__(self, key: int, count: int, device: torch.device) -> None:
        self._key, self._count = key, count
        self._turns = torch.arange(-(-count // 4), device=device)

    def at(self, step: Tensor) -> Tensor:
        """The bits of one step, looked up on the device."""
        return torch.stack(keyed.words(self._key, self._turns, step), 1).flatten()[: self._count]
