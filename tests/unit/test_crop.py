"""Random crops and flips of images in memory: even, keyed to positions, and the same for arrays and tensors."""

from __future__ import annotations

import numpy as np
import torch

from conftest import make_plan
from paceline import keyed
from paceline.augment.crop import crop, draw_offsets, pad
from paceline.augment.flip import draw_flips
from paceline.numpy_types import Int64s
from paceline.settings.augment import Augment
from paceline.settings.recipe import Recipe

IMAGES = keyed.words(1, np.arange(96 * 8 * 8 * 3, dtype=np.int64))[0].astype(np.uint8).reshape(96, 8, 8, 3)


def moved(recipe: Recipe, positions: Int64s) -> Int64s:
    """Offsets and flips of positions, where it does not matter which images stand there."""
    flipped = draw_flips(recipe, positions, positions, positions * 0)
    return np.vstack([draw_offsets(recipe, positions), flipped])


def test_crops_of_arrays_and_tensors_have_the_same_pixels() -> None:
    recipe = make_plan("augment.pad=4").recipe
    wide = pad(IMAGES, recipe.augment)
    numbers, moves = np.arange(40, 0, -1), moved(recipe, np.arange(1000, 1040, dtype=np.int64))
    host = crop(wide, numbers, moves[:2], moves[2], np.arange(8))
    device = crop(*(torch.tensor(x) for x in (wide, numbers, moves[:2], moves[2], np.arange(8))))
    assert np.array_equal(host, device.numpy())


def test_moves_reach_every_corner_evenly_and_mirror_half() -> None:
    recipe = make_plan("augment.pad=2", "augment.flip=true").recipe
    down, right, mirrored = moved(recipe, np.arange(20_000, dtype=np.int64))
    counts = np.bincount(down * 5 + right, minlength=25)
    assert counts.min() > 20_000 / 25 * 0.8
    assert counts.max() < 20_000 / 25 * 1.2
    assert abs(mirrored.mean() - 0.5) < 0.02
    assert set(mirrored.tolist()) == {0, 1}


def test_moves_depend_on_position_and_seed_alone() -> None:
    recipe = make_plan("augment.pad=4").recipe
    positions = np.array([7, 1, 2**40], np.int64)
    moves = moved(recipe, positions)
    for place, position in enumerate(positions):
        assert np.array_equal(moved(recipe, np.array([position]))[:, 0], moves[:, place])
    other = moved(recipe.model_copy(update={"seed": 1}), np.arange(100, dtype=np.int64))
    assert not np.array_equal(other, moved(recipe, np.arange(100, dtype=np.int64)))


def test_pictures_without_a_border_are_not_copied() -> None:
    assert pad(IMAGES, Augment()) is IMAGES
