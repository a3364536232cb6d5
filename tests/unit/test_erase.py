"""Erased boxes and cutout: how large they are, and where they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conftest import make_recipe
from paceline.augment.erase import draw_cutout, draw_erase
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.recipe import Recipe

SIDE = 8


def edges(draw: Callable[[Recipe, Int64s, int], Float64s | None], recipe: Recipe, side: int) -> Float64s:
    drawn = draw(recipe, np.arange(20_000, dtype=np.int64), side)
    assert drawn is not None
    return drawn


def test_erased_boxes_have_the_wanted_area_and_shape_and_lie_inside() -> None:
    recipe = make_recipe("augment.erase={probability: 0.25, area: [0.1, 0.4], aspect: [0.5, 2]}")
    side = 100
    top, left, bottom, right = edges(draw_erase, recipe, side)
    height, width = bottom - top, right - left
    erased = height > 0
    assert abs(erased.mean() - 0.25) < 0.01
    assert min(top.min(), left.min()) >= 0
    assert max(bottom.max(), right.max()) <= side
    area, aspect = (height * width)[erased] / side**2, (height / np.maximum(width, 1))[erased]
    assert 0.095 < area.min() < 0.11
    assert 0.39 < area.max() < 0.41
    assert 0.48 < aspect.min() < 0.55
    assert 1.9 < aspect.max() < 2.1
    assert abs((aspect > 1).mean() - 0.5) < 0.03  # each doubling is as likely
    assert {0, side} <= {*top[erased], *bottom[erased]}


def test_a_box_that_never_fits_erases_nothing() -> None:
    recipe = make_recipe("augment.erase={probability: 1, area: [1, 1], aspect: [1, 1]}")
    assert not edges(draw_erase, recipe, 32).any()


def test_cutout_is_centered_on_every_pixel_alike_and_cut_at_the_border() -> None:
    rows = edges(draw_cutout, make_recipe("augment.cutout=4"), SIDE)
    centers = {}
    for center in range(SIDE):
        centers[(max(0, center - 2), min(SIDE, center + 2))] = 0
    for top, left, bottom, right in rows.T.astype(int).tolist():
        assert (left, right) in centers
        centers[(top, bottom)] += 1
    assert min(centers.values()) > 20_000 / SIDE * 0.9
