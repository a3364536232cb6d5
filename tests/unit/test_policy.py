"""AutoAugment and RandAugment: operations make Pillow's pictures, and who gets which follows from positions alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import make_recipe
from paceline import keyed
from paceline.augment import policy
from paceline.augment.policy import KINDS, MOVES, NUMBERS, ONE, TENSORFLOW, TIMM, TORCH, matrices
from paceline.augment.policy_ops import apply, operate

pytestmark = pytest.mark.usefixtures("one_thread")

SIDE, GRAY = 17, 128
BRIGHTNESS = {round((1 + sign * level / 10) * ONE) for sign in (-1, 1) for level in (9, 7, 6, 3)}
"""The factors of all levels of brightness in CIFAR-10's table."""
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
    numbers = np.zeros((NUMBERS, len(PICTURES)), np.int64)
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
    given = torch.tensor(numbers + [0] * (NUMBERS - len(numbers)), dtype=torch.int32)[:, None]
    assert operate(kind, row_of(*before), given, GRAY, False)[0].tolist() == row_of(*after)[0].tolist()


def test_equalize_spreads_frequent_values_apart() -> None:
    picture = row_of(*([10] * 255 + [11] * 255 + [200] * 90))
    made = operate("equalize", picture, torch.zeros(NUMBERS, 1, dtype=torch.int32), GRAY, False)
    assert sorted(set(made.flatten().tolist())) == [0, 128, 255]  # 510 pixels below the last value: steps of 2


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "efficientnet"])
def test_the_tables_have_25_pairs_of_known_operations(name: str) -> None:
    pairs = policy.table(name)
    assert len(pairs) == 25
    for operation, chance, level in (entry for pair in pairs for entry in pair):
        assert operation in KINDS or operation in MOVES
        assert 0 <= chance <= 1
        assert 0 <= level <= (10 if name == "efficientnet" else 9)


def drawn(words: str, count: int = 20_000, side: int = 32) -> list[policy.Layer]:
    return policy.draw(make_recipe(f"augment.policy={words}"), np.arange(count, dtype=np.int64), side)


def test_a_pair_is_chosen_for_each_image_and_each_half_comes_by_its_chance() -> None:
    first, second = drawn("{name: autoaugment, table: imagenet}")
    pairs = policy.table("imagenet")
    for layer, place in ((first, 0), (second, 1)):
        for kind in ("posterize", "equalize", "contrast"):
            expected = sum(pair[place][1] for pair in pairs if pair[place][0] == kind) / len(pairs)
            assert abs((layer.kinds == KINDS.index(kind)).mean() - expected) < 0.01
    # Whoever got contrast in the second layer, got color or nothing in the first: they are one pair.
    before = first.kinds[second.kinds == KINDS.index("contrast")]
    assert set(before.tolist()) == {0, KINDS.index("color")}


@pytest.mark.parametrize(("form", "operations"), [("torch", TORCH), ("tensorflow", TENSORFLOW), ("timm", TIMM)])
def test_every_operation_is_as_likely_and_layers_are_independent(form: str, operations: tuple[str, ...]) -> None:
    layers = drawn(f"{{name: randaugment, layers: 3, probability: 0.5, form: {form}}}")
    assert len(layers) == 3
    moves = sum(name in MOVES for name in operations)
    for layer in layers:
        shares = np.bincount(layer.kinds, minlength=len(KINDS)) / len(layer.kinds)
        for kind, share in zip(KINDS[1:], shares[1:], strict=True):
            wanted = moves if kind == "affine" else kind in operations
            assert abs(share - 0.5 * wanted / len(operations)) < 0.01
    both = (layers[0].kinds == layers[1].kinds) & (layers[0].kinds > 0)
    assert both.mean() < 0.08


@pytest.mark.parametrize(
    ("words", "kind", "amounts"),
    [
        ("{name: randaugment, magnitude: 10}", "contrast", {round(0.1 * ONE), round(1.9 * ONE)}),
        ("{name: randaugment, magnitude: 5, form: tensorflow}", "contrast", {ONE}),
        ("{name: randaugment, magnitude: 10}", "posterize", {4}),
        ("{name: randaugment, magnitude: 10, form: tensorflow}", "posterize", {4}),
        ("{name: randaugment, magnitude: 0}", "posterize", {8}),
        ("{name: randaugment, magnitude: 0}", "solarize", {255}),
        ("{name: randaugment, magnitude: 10}", "solarize", {0}),
        ("{name: randaugment, magnitude: 10, form: tensorflow}", "solarize", {256}),
        ("{name: randaugment, magnitude: 10, form: tensorflow}", "solarize-add", {110}),
        ("{name: randaugment, magnitude: 10, form: timm}", "contrast", {round(0.1 * ONE), round(1.9 * ONE)}),
        ("{name: randaugment, magnitude: 6, form: timm}", "posterize", {2}),
        ("{name: randaugment, magnitude: 6, form: timm}", "solarize", {256 - 153}),
        ("{name: autoaugment, table: cifar10}", "brightness", BRIGHTNESS),
        ("{name: autoaugment, table: efficientnet, form: tensorflow}", "solarize-add", {33, 77}),
        ("{name: autoaugment, table: efficientnet}", "solarize", {0, 29, 142, 170, 199}),
    ],
)  # fmt: skip
def test_magnitudes_mean_what_each_form_says(words: str, kind: str, amounts: set[int]) -> None:
    found: set[int] = set()
    for layer in drawn(words):
        found |= set(layer.numbers[0, layer.kinds == KINDS.index(kind)].tolist())
    assert found == amounts


@pytest.mark.parametrize(
    ("words", "pixels"),
    [
        ("{name: randaugment, magnitude: 10}", 101),
        ("{name: randaugment, magnitude: 10, form: tensorflow}", 100),
        ("{name: randaugment, magnitude: 9, form: timm}", 0.9 * 0.45 * 224),
        ("{name: autoaugment, table: efficientnet, form: tensorflow}", 225),
    ],
)
def test_images_move_as_far_as_each_form_says(words: str, pixels: float) -> None:
    *_, down = matrices("translate-y", np.array([-pixels, pixels]), 224)
    moved = set()
    for layer in drawn(words, side=224):
        straight = (layer.numbers[0] == ONE) & (layer.numbers[1] == 0) & (layer.numbers[3] == 0)
        moved |= set(layer.numbers[5, straight & (layer.numbers[5] != ONE // 2)].tolist()) & set(down.tolist())
    assert moved == set(down.tolist())


def test_magnitudes_spread_about_their_middle_and_stay_within_bounds() -> None:
    def factors(words: str) -> NDArray[np.float64]:
        (layer,) = drawn(f"{{name: randaugment, layers: 1, form: timm, {words}}}", 200_000)
        levels: NDArray[np.float64] = np.abs(layer.numbers[0, layer.kinds == KINDS.index("color")] / ONE - 1) / 0.09
        return levels

    found = factors("magnitude: 6, magnitude_std: 0.5")
    assert found.mean() == pytest.approx(6, abs=0.02)
    assert found.std() == pytest.approx(0.5, abs=0.02)
    ends = factors("magnitude: 9.5, magnitude_std: 3")
    assert ends.max() == pytest.approx(10, abs=1e-3)
    assert (ends > 9.99).mean() == pytest.approx(0.434, abs=0.02)  # a normal number lies above 0.5 / 3 so often


def test_what_an_image_gets_depends_on_its_position_alone() -> None:
    recipe = make_recipe("augment.policy={name: randaugment, form: tensorflow, magnitude_std: 2}")
    positions = np.array([5, 2**40, 0, 17], np.int64)
    whole = policy.draw(recipe, positions, 32)
    for place, position in enumerate(positions):
        for one, layer in zip(policy.draw(recipe, np.array([position]), 32), whole, strict=True):
            assert one.kinds[0] == layer.kinds[place]
            assert np.array_equal(one.numbers[:, 0], layer.numbers[:, place])
    other = policy.draw(recipe.model_copy(update={"seed": 9}), np.arange(50, dtype=np.int64), 32)
    assert not np.array_equal(other[0].kinds, policy.draw(recipe, np.arange(50, dtype=np.int64), 32)[0].kinds)


def test_layers_follow_one_another_and_change_nobody_else() -> None:
    kinds = [KINDS.index(kind) for kind in ("none", "invert", "solarize", "none", "invert")]
    numbers = np.zeros((NUMBERS, 5), np.int64)
    numbers[0] = 200
    layers = [policy.Layer(np.array(kinds), numbers), policy.Layer(np.array(kinds[::-1]), numbers)]
    given = torch.tensor(PICTURES)
    made = apply(given, layers, GRAY, smooth=False)
    solarized = torch.where(given < 200, given, 255 - given)
    inverted = 255 - given
    twice = torch.where(solarized < 200, solarized, 255 - solarized)
    expected = [inverted[0], inverted[1], twice[2], inverted[3], inverted[4]]
    assert torch.equal(made, torch.stack(expected))
    assert torch.equal(given, torch.tensor(PICTURES))
