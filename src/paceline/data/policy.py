"""AutoAugment and RandAugment: which operation each image gets and how much of it, by numbers keyed to its position.

All numbers are whole (fractions in 65536ths), so that every device makes the same pixels of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.data.augment import square
from paceline.pictures import AutoAugment, Policy
from paceline.recipe import Recipe

Whole = NDArray[np.int64]
Numbers = NDArray[np.float64]
Entry = tuple[str, float, float]
"""An operation, its chance, and how much of the most it does (0 to 1)."""

ONE = 1 << 16
"""What 1 is in whole numbers."""
NUMBERS = 6
"""Whole numbers that go with an operation: a matrix, a box, or one amount."""
KINDS = (
    "none", "affine", "autocontrast", "invert", "equalize", "solarize", "solarize-add", "posterize", "contrast",
    "color", "brightness", "sharpness", "cutout",
)  # fmt: skip
"""What is done to pixels; every move of pixels is one kind."""
MOVES = ("shear-x", "shear-y", "translate-x", "translate-y", "rotate")

TORCH = (
    "identity", *MOVES, "brightness", "color", "contrast", "sharpness", "posterize", "solarize", "autocontrast",
    "equalize",
)  # fmt: skip
TENSORFLOW = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast", "brightness",
    "sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add",
)  # fmt: skip
"""What RandAugment chooses from, in either form."""

# Operation, chance and level (0 to 9), twice: the pairs as the AutoAugment paper prints them.
IMAGENET = """
posterize 0.4 8 rotate 0.6 9, solarize 0.6 5 autocontrast 0.6 5, equalize 0.8 8 equalize 0.6 3,
posterize 0.6 7 posterize 0.6 6, equalize 0.4 7 solarize 0.2 4, equalize 0.4 4 rotate 0.8 8,
solarize 0.6 3 equalize 0.6 7, posterize 0.8 5 equalize 1.0 2, rotate 0.2 3 solarize 0.6 8,
equalize 0.6 8 posterize 0.4 6, rotate 0.8 8 color 0.4 0, rotate 0.4 9 equalize 0.6 2,
equalize 0.0 7 equalize 0.8 8, invert 0.6 4 equalize 1.0 8, color 0.6 4 contrast 1.0 8,
rotate 0.8 8 color 1.0 2, color 0.8 8 solarize 0.8 7, sharpness 0.4 7 invert 0.6 8,
shear-x 0.6 5 equalize 1.0 9, color 0.4 0 equalize 0.6 3, equalize 0.4 7 solarize 0.2 4,
solarize 0.6 5 autocontrast 0.6 5, invert 0.6 4 equalize 1.0 8, color 0.6 4 contrast 1.0 8,
equalize 0.8 8 equalize 0.6 3
"""
CIFAR10 = """
invert 0.1 7 contrast 0.2 6, rotate 0.7 2 translate-x 0.3 9, sharpness 0.8 1 sharpness 0.9 3,
shear-y 0.5 8 translate-y 0.7 9, autocontrast 0.5 8 equalize 0.9 2, shear-y 0.2 7 posterize 0.3 7,
color 0.4 3 brightness 0.6 7, sharpness 0.3 9 brightness 0.7 9, equalize 0.6 5 equalize 0.5 1,
contrast 0.6 7 sharpness 0.6 5, color 0.7 7 translate-x 0.5 8, equalize 0.3 7 autocontrast 0.4 8,
translate-y 0.4 3 sharpness 0.2 6, brightness 0.9 6 color 0.2 8, solarize 0.5 2 invert 0.0 3,
equalize 0.2 0 autocontrast 0.6 0, equalize 0.2 8 equalize 0.6 4, color 0.9 9 equalize 0.6 6,
autocontrast 0.8 4 solarize 0.2 8, brightness 0.1 3 color 0.7 0, solarize 0.4 5 autocontrast 0.9 3,
translate-y 0.9 9 translate-y 0.7 9, autocontrast 0.9 2 solarize 0.8 3, equalize 0.8 8 invert 0.1 3,
translate-y 0.7 9 autocontrast 0.9 1
"""


@dataclass(frozen=True)
class Layer:
    """One operation for each image."""

    kinds: Whole
    """The place in KINDS of what each image gets."""
    numbers: Whole
    """NUMBERS rows of what goes with it."""

    @property
    def groups(self) -> tuple[Whole, list[tuple[str, int]]]:
        """The images ordered by kind, and how many there are of each kind that does something."""
        order = np.argsort(self.kinds, kind="stable")
        counts = np.bincount(self.kinds, minlength=len(KINDS)).tolist()
        return order[counts[0] :], [(kind, n) for kind, n in zip(KINDS[1:], counts[1:], strict=True) if n]


def table(name: str) -> list[tuple[tuple[str, float, int], tuple[str, float, int]]]:
    """The published pairs of a data set: operation, chance and level of each."""
    pairs = []
    for line in {"imagenet": IMAGENET, "cifar10": CIFAR10}[name].split(","):
        a, b, c, d, e, f = line.split()
        pairs.append(((a, float(b), int(c)), (d, float(e), int(f))))
    return pairs


def draw(recipe: Recipe, positions: Whole, side: int) -> list[Layer]:
    """What each image at these positions gets, in each layer of the recipe's policy."""
    policy = recipe.augment.policy
    if policy is None:
        return []
    rows = _rows(policy)
    layers = []
    for index, row in enumerate(rows):
        # The two operations of a pair are chosen together.
        word = keyed.words(keyed.key(recipe.seed, "policy"), positions, 0 if policy.name == "autoaugment" else index)[0]
        chosen = keyed.integers(word, len(row))
        layers.append(_layer(recipe.seed, policy.form, positions, index, row, chosen, side))
    return layers


def _rows(policy: Policy) -> list[list[Entry]]:
    """What each layer of a policy chooses from."""
    if isinstance(policy, AutoAugment):
        most = 9 if policy.form == "torch" else 10
        columns = zip(*table(policy.table), strict=True)
        return [[(operation, chance, level / most) for operation, chance, level in column] for column in columns]
    operations = TORCH if policy.form == "torch" else TENSORFLOW
    return [[(operation, policy.chance, policy.magnitude / 10) for operation in operations]] * policy.layers


def _layer(seed: int, form: str, positions: Whole, index: int, row: list[Entry], chosen: Whole, side: int) -> Layer:
    """One operation of `row` for each image, where its chance comes up."""
    _, high, low, sign = keyed.words(keyed.key(seed, "policy"), positions, index)
    down, right, *_ = keyed.words(keyed.key(seed, "policy cutout"), positions, index)
    happens = keyed.uniforms(high, low) < np.array([chance for _, chance, _ in row])[chosen]
    signs = 1 - 2 * (sign >> 31).astype(np.float64)
    kinds = np.zeros(len(positions), np.int64)
    numbers = np.zeros((NUMBERS, len(positions)), np.int64)
    for place, (operation, _, share) in enumerate(row):
        here = np.flatnonzero(happens & (chosen == place))
        if not len(here) or operation == "identity":
            continue
        kinds[here] = KINDS.index("affine" if operation in MOVES else operation)
        if operation in MOVES:
            numbers[:, here] = matrices(operation, _reach(operation, share, side) * signs[here], side)
        elif operation == "cutout":
            length = np.full(len(here), round(share * side * 80 / 224))
            numbers[:4, here] = square(down[here], right[here], length, side)
        else:
            numbers[0, here] = _amount(form, operation, share, signs[here])
    return Layer(kinds, numbers)


def _reach(operation: str, share: float, side: int) -> float:
    """How far pixels move, one way or the other: 0.3 of a row, 150 of 331 pixels, or 30 degrees at the most."""
    if operation.startswith("shear"):
        return 0.3 * share
    return 30 * share if operation == "rotate" else float(int(150 / 331 * side * share))


def matrices(operation: str, amounts: Numbers, side: int) -> Whole:
    """Where a pixel comes from: column = a x + b y + c and row = d x + e y + f in 65536ths, for column x and row y.

    A pixel's middle is where it is looked up, so c and f hold half a pixel of each. Shears leave the upper left corner,
    and turns (degrees, against the clock) the middle, where they are.
    """
    one, zero = np.ones(len(amounts)), np.zeros(len(amounts))
    made: dict[str, Callable[[], list[Numbers]]] = {
        "shear-x": lambda: [one, amounts, zero, zero, one, zero],
        "shear-y": lambda: [one, zero, zero, amounts, one, zero],
        "translate-x": lambda: [one, zero, amounts, zero, one, zero],
        "translate-y": lambda: [one, zero, zero, zero, one, amounts],
        "rotate": lambda: _turned(np.deg2rad(amounts), side / 2),
    }
    a, b, c, d, e, f = made[operation]()
    return np.floor(ONE * np.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2]) + 0.5).astype(np.int64)


def _turned(angles: Numbers, middle: float) -> list[Numbers]:
    cosine, sine = np.cos(angles), np.sin(angles)
    return [cosine, -sine, middle * (1 - cosine + sine), sine, cosine, middle * (1 - cosine - sine)]


def _amount(form: str, operation: str, share: float, signs: Numbers) -> Whole | int:
    """The one number of an operation: a factor in 65536ths, a threshold, what is added, or bits that are kept."""
    match operation, form:
        case "solarize", "torch":
            return math.ceil(round(255 * (1 - share), 6))
        case "solarize", _:
            return int(256 * share)
        case "solarize-add", _:
            return int(110 * share)
        case "posterize", "torch":
            return 8 - round(4 * share)
        case "posterize", _:
            return int(4 * share)
        case (("contrast" | "color" | "brightness" | "sharpness"), "torch"):
            return np.rint(ONE * (1 + 0.9 * share * signs)).astype(np.int64)
        case (("contrast" | "color" | "brightness" | "sharpness"), _):
            return round(ONE * (0.1 + 1.8 * share))
        case _:
            return 0
