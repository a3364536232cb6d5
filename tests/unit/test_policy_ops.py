"""Operations of AutoAugment and RandAugment: they give Pillow's pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline import keyed
from paceline.augment.policy import KINDS, ONE, PARAMETERS, PolicyLayer, matrices
from paceline.augment.policy_ops import PolicyDraws, apply_policy, operate
from paceline.settings.augment import RandAugment

SIDE, GRAY = 17, 128
FACTORS = (0.0, 0.125, 0.75, 1.0, 1.5, 1.875)


def pictures() -> NDArray[np.uint8]:
    """Noise, noise of little contrast, one single color, and a channel of few values."""
    words = keyed.words(keyed.key(0, "pictures"), np.arange(5 * 3 * SIDE * SIDE, dtype=np.int64))[0]
    made = (words >> 24).astype(np.uint8).reshape(5, 3, SIDE, SIDE)
    made[1] = made[1] // 4 + 60
    made[2] = 77
    made[3, 1] //= 100
    return made


PICTURES = pictures()


def operated(kind: str, number: int | NDArray[np.int64], smooth: bool = False) -> NDArray[np.int64]:
    numbers = np.zeros((PARAMETERS, len(PICTURES)), np.int64)
    if isinstance(number, int):
        numbers[0] = number
    else:
        numbers[:] = number
    given = torch.tensor(numbers, dtype=torch.int32)
    made: NDArray[np.int64] = operate(kind, torch.tensor(PICTURES), given, GRAY, smooth).numpy().astype(np.int64)
    return made


def by_pillow(change: Callable[[Any], Any]) -> NDArray[np.int64]:
    image = pytest.importorskip("PIL.Image")
    made = [np.asarray(change(image.fromarray(picture.transpose(1, 2, 0)))) for picture in PICTURES]
    return np.stack(made).transpose(0, 3, 1, 2).astype(np.int64)


@pytest.mark.parametrize("name", ["invert", "equalize"])
def test_invert_and_equalize_make_pillow_s_pictures(name: str) -> None:
    operations = pytest.importorskip("PIL.ImageOps")
    assert np.array_equal(operated(name, 0), by_pillow(getattr(operations, name)))


def test_autocontrast_is_pillow_s_but_for_the_rounding_of_its_fractions() -> None:
    operations = pytest.importorskip("PIL.ImageOps")
    found = np.abs(operated("autocontrast", 0) - by_pillow(operations.autocontrast))
    assert found.max() <= 1
    assert (found > 0).mean() < 0.01


@pytest.mark.parametrize(
    ("name", "number"), [("posterize", 1), ("posterize", 4), ("posterize", 8)] + [("solarize", n) for n in (0, 99, 256)]
)
def test_posterize_and_solarize_make_pillow_s_pictures(name: str, number: int) -> None:
    operations = pytest.importorskip("PIL.ImageOps")
    assert np.array_equal(operated(name, number), by_pillow(lambda image: getattr(operations, name)(image, number)))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", ["contrast", "color", "brightness", "sharpness"])
def test_enhancements_make_pillow_s_pictures(name: str, factor: float) -> None:
    enhance = getattr(pytest.importorskip("PIL.ImageEnhance"), name.capitalize())
    expected = by_pillow(lambda image: enhance(image).enhance(factor))
    assert np.array_equal(operated(name, round(factor * ONE)), expected)


@pytest.mark.parametrize("smooth", [False, True], ids=["nearest", "bilinear"])
@pytest.mark.parametrize(
    ("name", "amount", "matrix"),
    [
        ("shear-x", 0.25, (1, 0.25, 0, 0, 1, 0)),
        ("shear-y", -0.375, (1, 0, 0, -0.375, 1, 0)),
        ("translate-x", -5.0, (1, 0, -5, 0, 1, 0)),
        ("translate-y", 3.0, (1, 0, 0, 0, 1, 3)),
    ],
)
def test_shears_and_moves_make_pillow_s_pictures(
    name: str, amount: float, matrix: tuple[float, ...], smooth: bool
) -> None:
    image = pytest.importorskip("PIL.Image")
    sampling = image.Resampling.BILINEAR if smooth else image.Resampling.NEAREST
    gray = (GRAY,) * 3
    expected = by_pillow(
        lambda picture: picture.transform(picture.size, image.Transform.AFFINE, matrix, sampling, fillcolor=gray)
    )
    found = operated("affine", matrices(name, np.full(len(PICTURES), amount), SIDE), smooth)
    assert np.abs(found - expected).max() <= (1 if smooth else 0)
    assert (found != PICTURES).any()


@pytest.mark.parametrize("smooth", [False, True], ids=["nearest", "bilinear"])
@pytest.mark.parametrize("angle", [10.0, -27.3, 30.0])
def test_turns_make_pillow_s_pictures(angle: float, smooth: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    sampling = image.Resampling.BILINEAR if smooth else image.Resampling.NEAREST
    expected = by_pillow(lambda picture: picture.rotate(angle, sampling, fillcolor=(GRAY,) * 3))
    found = operated("affine", matrices("rotate", np.full(len(PICTURES), angle), SIDE), smooth)
    assert np.abs(found - expected).max() <= (1 if smooth else 0)


def row_of(*values: int) -> torch.Tensor:
    """A picture of one row, the same in all three channels."""
    return torch.tensor(values, dtype=torch.uint8).expand(1, 3, 1, -1)


@pytest.mark.parametrize(
    ("kind", "numbers", "before", "after"),
    [
        ("invert", [0], (0, 100, 255), (255, 155, 0)),
        ("autocontrast", [0], (50, 100, 150), (0, 127, 255)),
        ("autocontrast", [0], (50, 50, 50), (50, 50, 50)),
        ("solarize", [100], (99, 100, 255), (99, 155, 0)),
        ("solarize-add", [60], (0, 100, 127, 128, 255), (60, 160, 187, 128, 255)),
        ("posterize", [2], (63, 64, 200, 255), (0, 64, 192, 192)),
        ("posterize", [0], (63, 255), (0, 0)),
        ("brightness", [ONE // 2], (0, 101, 255), (0, 50, 127)),
        ("contrast", [2 * ONE], (50, 100, 150), (0, 100, 200)),
        ("color", [0], (9, 99, 199), (9, 99, 199)),
        ("sharpness", [0], (1, 200, 3), (1, 200, 3)),
        ("affine", [ONE, 0, ONE + ONE // 2, 0, ONE, ONE // 2], (1, 2, 3), (2, 3, GRAY)),
        ("cutout", [0, 1, 1, 3], (1, 2, 3, 4), (1, GRAY, GRAY, 4)),
        ("equalize", [0], (5, 5, 9), (5, 5, 9)),
    ],
)
def test_small_pictures_become_what_a_hand_makes_of_them(
    kind: str, numbers: list[int], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    given = torch.tensor(numbers + [0] * (PARAMETERS - len(numbers)), dtype=torch.int32)[:, None]
    assert operate(kind, row_of(*before), given, GRAY, False)[0].tolist() == row_of(*after)[0].tolist()


def test_equalize_spreads_frequent_values_apart() -> None:
    picture = row_of(*([10] * 255 + [11] * 255 + [200] * 90))
    made = operate("equalize", picture, torch.zeros(PARAMETERS, 1, dtype=torch.int32), GRAY, False)
    assert sorted(set(made.flatten().tolist())) == [0, 128, 255]  # 510 pixels below the last value: steps of 2


def test_layers_follow_one_another_and_change_nobody_else() -> None:
    kinds = [KINDS.index(kind) for kind in ("none", "invert", "solarize", "none", "invert")]
    numbers = np.zeros((PARAMETERS, 5), np.int64)
    numbers[0] = 200
    layers = [PolicyLayer(np.array(kinds), numbers), PolicyLayer(np.array(kinds[::-1]), numbers)]
    given = torch.tensor(PICTURES)
    draws = PolicyDraws.of(layers, torch.device("cpu"))
    assert draws is not None
    made = apply_policy(RandAugment(name="randaugment", fill=GRAY), given, draws)
    solarized = torch.where(given < 200, given, 255 - given)
    inverted = 255 - given
    twice = torch.where(solarized < 200, solarized, 255 - solarized)
    expected = [inverted[0], inverted[1], twice[2], inverted[3], inverted[4]]
    assert torch.equal(made, torch.stack(expected))
    assert torch.equal(given, torch.tensor(PICTURES))
