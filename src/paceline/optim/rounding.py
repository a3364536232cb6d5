"""Stochastic rounding to 16 bits: up or down at random, with odds that keep the mean exact; the bits are keyed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import keyed

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""How many bits of a float32's fraction each type drops."""
_SMALLEST_NORMAL = 2.0**-14
"""The smallest normal float16; below it, neighbors are 2^-24 apart."""


def stochastic_round(wide: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Float32 numbers rounded to one of their two 16-bit neighbors, the nearer the likelier; infinity and NaN stay.

    `bits` holds 32 random bits for each number.
    """
    dropped = _DROPPED[dtype]
    noise = (bits >> (32 - dropped)).to(torch.int32)
    # A float stores its sign apart from its size. Adding noise to the bits that are dropped carries into the last bit
    # that stays, and does so the more often the larger the dropped part is.
    rounded = ((wide.view(torch.int32) + noise) & -(1 << dropped)).view(torch.float32)
    if dtype == torch.float16:
        units = wide.abs() * 2.0**24
        whole = units.floor()
        whole = whole + (units - whole > (bits >> 8) * 2.0**-24)
        rounded = torch.where(wide.abs() < _SMALLEST_NORMAL, torch.copysign(whole * 2.0**-24, wide), rounded)
    return torch.where(wide.isfinite(), rounded, wide).to(dtype)


@dataclass(frozen=True)
class Rounding:
    """How the 16-bit weights of a group are rounded stochastically."""

    key: int
    starts: dict[str, int]
    """At which number of the whole group each parameter starts: its bits stay the same where the group is cut."""


class RoundingBits:
    """32 random bits for each number in every step; one call of the generator serves four neighbors.

    `fours` has the positions of the numbers, a fourth of each: 0 stands for the numbers 0 to 3.
    """

    def __init__(self, key: int, fours: Tensor) -> None:
        self._key, self._fours = key, fours

    def at(self, step: Tensor) -> Tensor:
        """The bits of a step, which is a 0-dimensional tensor on the device."""
        return torch.stack(keyed.words(self._key, self._fours, step), 1).flatten()
