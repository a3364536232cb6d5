"""Stochastic rounding: always a neighbor, right on average, and the same wherever it is done."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import keyed
from paceline.optim.rounding import RoundingBits, stochastic_round

TYPES = [torch.bfloat16, torch.float16]
MANY = 40_000


def rounded(value: float, dtype: torch.dtype, count: int = MANY) -> Tensor:
    words = RoundingBits(keyed.key(3, "test"), torch.arange(count // 4)).at(torch.tensor(5))
    return stochastic_round(torch.full((count,), value), dtype, words)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [1.0, -0.375, 0.0, 2.0**-14, 384.0])
def test_what_16_bits_can_hold_stays(dtype: torch.dtype, value: float) -> None:
    assert torch.equal(rounded(value, dtype, 100), torch.full((100,), value, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, -3.14159, 1e-3, 777.77, 3e-6, -1.3e-7, 2.0**-14 * 1.0003])
def test_every_number_becomes_a_neighbor_and_the_mean_is_kept(dtype: torch.dtype, value: float) -> None:
    result = rounded(value, dtype).double()
    down, up = result.min(), result.max()
    exact = float(torch.tensor(value))
    assert down <= exact <= up
    assert result.unique().numel() == 2
    narrow = torch.tensor([down, up], dtype=dtype)
    between = torch.nextafter(narrow[0], narrow[1]) if dtype == torch.bfloat16 else _next_half(narrow[0])
    assert between == narrow[1]
    fraction = (exact - down) / (up - down)
    error = float((result.mean() - exact).abs() / (up - down))
    assert error < 5 * float((fraction * (1 - fraction) / MANY).sqrt()) + 1e-4


def _next_half(value: Tensor) -> Tensor:
    bits = value.view(torch.int16)
    return (bits + (1 if value > 0 else -1)).view(torch.float16)


@pytest.mark.parametrize("steps", [0, 1, 3, 1000])
def test_the_largest_bits_do_not_move_what_float16_can_hold(steps: int) -> None:
    exact = torch.tensor([steps * 2.0**-24])
    result = stochastic_round(exact, torch.float16, torch.tensor([2**32 - 1]))
    assert result.item() == exact.item()
    assert stochastic_round(exact, torch.float16, torch.tensor([0])).item() == exact.item()


@pytest.mark.parametrize("dtype", TYPES)
def test_infinity_and_not_a_number_pass_through(dtype: torch.dtype) -> None:
    wide = torch.tensor([float("inf"), -float("inf"), float("nan")])
    result = stochastic_round(wide, dtype, torch.full((3,), 2**32 - 1))
    assert result[0] == float("inf")
    assert result[1] == -float("inf")
    assert result[2].isnan()


def test_small_steps_are_not_lost_on_average() -> None:
    weight, lost = torch.ones(4000, dtype=torch.bfloat16), torch.ones(4000, dtype=torch.bfloat16)
    bits = RoundingBits(keyed.key(0, "rounding"), torch.arange(1000))
    for step in range(200):
        weight = stochastic_round(weight.float() + 1e-4, torch.bfloat16, bits.at(torch.tensor(step)))
        lost = (lost.float() + 1e-4).bfloat16()
    assert float(weight.float().mean()) == pytest.approx(1.02, abs=0.001)
    assert torch.all(lost == 1)


def test_bits_depend_on_key_step_and_position_alone() -> None:
    def bits(key: int, count: int, step: int) -> Tensor:
        return RoundingBits(key, torch.arange(count // 4)).at(torch.tensor(step))

    many = bits(7, 1000, 3)
    assert torch.equal(bits(7, 12, 3), many[:12])
    assert not torch.equal(many, bits(7, 1000, 4))
    assert not torch.equal(many, bits(8, 1000, 3))
    assert many.min() >= 0
    assert many.max() < 2**32
    words = keyed.words(7, torch.arange(250), 3)
    assert torch.equal(many.view(250, 4), torch.stack(words, 1))
