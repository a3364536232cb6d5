"""AutoAugment and RandAugment: which operation an image gets, and how much of it, follows from its position alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import make_recipe
from paceline.augment.policy import (
    AFFINE,
    KINDS,
    ONE,
    TENSORFLOW,
    TIMM,
    TORCH,
    PolicyLayer,
    draw_policy,
    matrices,
    table,
)  # fmt: skip

BRIGHTNESS = {round((1 + sign * level / 10) * ONE) for sign in (-1, 1) for level in (9, 7, 6, 3)}
"""The factors of all levels of brightness in CIFAR-10's table."""


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "efficientnet"])
def test_the_tables_have_25_pairs_of_known_operations(name: str) -> None:
    pairs = table(name)
    assert len(pairs) == 25
    for operation, chance, level in (entry for pair in pairs for entry in pair):
        assert operation in KINDS or operation in AFFINE
        assert 0 <= chance <= 1
        assert 0 <= level <= (10 if name == "efficientnet" else 9)


def drawn(words: str, count: int = 20_000, side: int = 32) -> list[PolicyLayer]:
    return draw_policy(make_recipe(f"augment.policy={words}"), np.arange(count, dtype=np.int64), side)


def test_a_pair_is_chosen_for_each_image_and_each_half_comes_by_its_chance() -> None:
    first, second = drawn("{name: autoaugment, table: imagenet}")
    pairs = table("imagenet")
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
    moves = sum(name in AFFINE for name in operations)
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
        found |= set(layer.parameters[0, layer.kinds == KINDS.index(kind)].tolist())
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
        straight = (layer.parameters[0] == ONE) & (layer.parameters[1] == 0) & (layer.parameters[3] == 0)
        moved |= set(layer.parameters[5, straight & (layer.parameters[5] != ONE // 2)].tolist()) & set(down.tolist())
    assert moved == set(down.tolist())


def test_magnitudes_spread_about_their_middle_and_stay_within_bounds() -> None:
    def factors(words: str) -> NDArray[np.float64]:
        (layer,) = drawn(f"{{name: randaugment, layers: 1, form: timm, {words}}}", 200_000)
        levels: NDArray[np.float64] = np.abs(layer.parameters[0, layer.kinds == KINDS.index("color")] / ONE - 1) / 0.09
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
    whole = draw_policy(recipe, positions, 32)
    for place, position in enumerate(positions):
        for one, layer in zip(draw_policy(recipe, np.array([position]), 32), whole, strict=True):
            assert one.kinds[0] == layer.kinds[place]
            assert np.array_equal(one.parameters[:, 0], layer.parameters[:, place])
    other = draw_policy(recipe.model_copy(update={"seed": 9}), np.arange(50, dtype=np.int64), 32)
    assert not np.array_equal(other[0].kinds, draw_policy(recipe, np.arange(50, dtype=np.int64), 32)[0].kinds)
