"""Random colors: as TensorFlow defines them, drawn within their bounds."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_recipe
from paceline import keyed
from paceline.augment.color import adjust_color, adjust_contrast, adjust_hue_and_saturation, draw_color


def pictures(count: int, side: int = 8) -> Tensor:
    """Keyed 8-bit images, channels last in memory as loaders give them."""
    words = keyed.words(keyed.key(3, "pictures"), np.arange(count * side * side * 3, dtype=np.int64))[0]
    return torch.tensor((words >> 24).astype(np.uint8).reshape(count, side, side, 3)).permute(0, 3, 1, 2)


def test_saturation_and_hue_are_those_of_hue_saturation_and_value() -> None:
    given = pictures(4, 5).double()
    factors, turns = torch.tensor([0.0, 0.5, 1.4, 3.0]), torch.tensor([0.0, 0.2, -0.1, 0.5])
    made = adjust_hue_and_saturation(given, factors[:, None, None, None].double(), turns[:, None, None, None].double())
    for image, (factor, turn) in enumerate(zip(factors.tolist(), turns.tolist(), strict=True)):
        for row, column in ((r, c) for r in range(5) for c in range(5)):
            h, s, v = colorsys.rgb_to_hsv(*(given[image, :, row, column] / 255).tolist())
            expected = colorsys.hsv_to_rgb((h + turn) % 1, min(1, s * factor), v)
            assert (made[image, :, row, column] / 255).tolist() == pytest.approx(expected, abs=1e-6)


def test_contrast_moves_each_channel_about_its_own_mean() -> None:
    given = torch.zeros(1, 3, 1, 2, dtype=torch.float64)
    given[0, 0, 0], given[0, 1, 0] = torch.tensor([10.0, 30.0]), torch.tensor([100.0, 100.0])
    made = adjust_contrast(given, torch.full((1, 1, 1, 1), 1.5, dtype=torch.float64))
    assert made[0, :, 0].tolist() == [[5.0, 35.0], [100.0, 100.0], [0.0, 0.0]]


def test_colors_come_in_the_drawn_order_and_are_clipped_only_at_the_end() -> None:
    given = pictures(2).double()
    drawn = torch.tensor([[40.0, 40.0], [1.3, 1.3], [0.1, 0.1], [1.4, 1.4], [0.0, 1.0]], dtype=torch.float64)
    saturation, hue, contrast = (row[:1, None, None, None] for row in drawn[1:4])
    late = adjust_contrast(adjust_hue_and_saturation(given[:1] + 40, saturation, hue), contrast)
    early = adjust_hue_and_saturation(adjust_contrast(given[1:] + 40, contrast), saturation, hue)
    assert float(late.max()) > 255
    made = adjust_color(make_recipe("augment.color.hue=0.1").augment, given, drawn)
    assert torch.allclose(made, torch.cat([late, early]).clamp(0, 255), rtol=1e-12)
    assert not torch.allclose(late, adjust_contrast(given[:1] + 40, contrast), atol=1)


def test_colors_are_drawn_within_their_ranges_and_both_orders_as_often() -> None:
    recipe = make_recipe("augment.color={brightness: 0.2, saturation: [0.5, 1.25], hue: 0.1, contrast: [0.75, 2]}")
    rows = draw_color(recipe, np.arange(20_000, dtype=np.int64), 8)
    assert rows is not None
    for row, (low, high) in zip(rows[:4], ((-51, 51), (0.5, 1.25), (-0.1, 0.1), (0.75, 2)), strict=True):
        assert low <= row.min() < low + 0.01 * (high - low)
        assert high >= row.max() > high - 0.01 * (high - low)
        assert abs(row.mean() - (low + high) / 2) < 0.02 * (high - low)
    assert abs(rows[4].mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 0.03
