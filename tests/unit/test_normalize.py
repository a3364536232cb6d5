"""Normalization: what the recipe says, as a module that needs no plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_plan
from paceline import keyed
from paceline.augment.exact_mean import exact_mean
from paceline.augment.normalize import Normalize, standardize


def pictures(count: int, side: int = 8) -> Tensor:
    """Keyed 8-bit images, channels last in memory as loaders give them."""
    words = keyed.words(keyed.key(3, "pictures"), np.arange(count * side * side * 3, dtype=np.int64))[0]
    return torch.tensor((words >> 24).astype(np.uint8).reshape(count, side, side, 3)).permute(0, 3, 1, 2)


def test_normalization_is_what_the_recipe_says() -> None:
    given = pictures(3)
    x = given.double()
    rows = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]], dtype=torch.float64)
    mean, std = (row.view(3, 1, 1) for row in rows)
    words = ("data.mean=[0.1, 0.5, 0.9]", "data.std=[0.2, 0.3, 0.4]")
    expected = {
        "mean-std": (x / 255 - mean) / std,
        "mean": x - 255 * mean,
        "unit": x / 255 * 2 - 1,
        "image": torch.stack([(one - one.mean()) / one.std(correction=0) for one in x]),
    }
    for kind, images in expected.items():
        assert torch.allclose(
            Normalize(make_plan(*words, f"data.normalize={kind}").data)(given), images, rtol=1e-6, atol=1e-6
        )


def test_an_image_of_one_color_is_standardized_to_zero_and_a_nearly_even_one_by_the_floor() -> None:
    even = torch.full((2, 3, 4, 4), 9.0, dtype=torch.float64)
    even[1, 0, 0, 0] = 9.125
    made = standardize(even)
    assert not made[0].any()
    mean = 0.125 / 48
    assert float(made[1, 0, 0, 0]) == pytest.approx((0.125 - mean) * math.sqrt(48), rel=1e-4)


def test_exact_means_are_means() -> None:
    given = pictures(2).double()
    assert torch.allclose(exact_mean(given, (2, 3)), given.mean((2, 3), keepdim=True), rtol=1e-12)
