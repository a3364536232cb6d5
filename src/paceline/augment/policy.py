"""AutoAugment and RandAugment: which operation each image gets and how much of it, by numbers keyed to its position.

All numbers are whole (fractions in 65536ths), so that every device makes the same pixels of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline import keyed
from paceline.augment.crop import square
from paceline.settings.augment import AutoAugment, Policy, RandAugment
from paceline.settings.recipe import Recipe

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
TIMM = tuple(operation for operation in TENSORFLOW if operation != "cutout")
"""What RandAugment chooses from, in each form."""
OPERATIONS = {"torch": TORCH, "tensorflow": TENSORFLOW, "timm": TIMM}
REACH = {
    ("autoaugment", "torch"): 150 / 331,
    ("randaugment", "torch"): 150 / 331,
    ("autoaugment", "tensorflow"): 250 / 224,
    ("randaugment", "tensorflow"): 100 / 224,
    ("randaugment", "timm"): 0.45,
}
"""How far an image moves at the most, as a share of its side; published pixels are those of images of 331 or 224."""

# Operation, chance and level (0 to 9), twice: the pairs as the AutoAugment paper prints them, and EfficientNet's.
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
EFFICIENTNET = """
equalize 0.8 1 shear-y 0.8 4, color 0.4 9 equalize 0.6 3, color 0.4 1 rotate 0.6 8,
solarize 0.8 3 equalize 0.4 7, solarize 0.4 2 solarize 0.6 2, color 0.2 0 equalize 0.8 8,
equalize 0.4 8 solarize-add 0.8 3, shear-x 0.2 9 rotate 0.6 8, color 0.6 1 equalize 1.0 2,
invert 0.4 9 rotate 0.6 0, equalize 1.0 9 shear-y 0.6 3, color 0.4 7 equalize 0.6 0,
posterize 0.4 6 autocontrast 0.4 7, solarize 0.6 8 color 0.6 9, solarize 0.2 4 rotate 0.8 9,
rotate 1.0 7 translate-y 0.8 9, shear-x 0.0 0 solarize 0.8 4, shear-y 0.8 0 color 0.6 4,
color 1.0 0 rotate 0.6 2, equalize 0.8 4 equalize 0.0 8, equalize 1.0 4 autocontrast 0.6 2,
shear-y 0.4 7 solarize-add 0.6 7, posterize 0.8 2 solarize 0.6 10, solarize 0.6 8 equalize 0.6 1,
color 0.8 6 rotate 0.4 5
"""
TABLES = {"imagenet": IMAGENET, "cifar10": CIFAR10, "efficientnet": EFFICIENTNET}


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
    """The published pairs of a table: operation, chance and level of each."""
    pairs = []
    for line in TABLES[name].split(","):
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
        layers.append(_layer(recipe.seed, policy, positions, index, row, chosen, side))
    return layers


def _rows(policy: Policy) -> list[list[Entry]]:
    """What each layer of a policy chooses from."""
    if isinstance(policy, AutoAugment):
        most = 9 if policy.form == "torch" else 10
        columns = zip(*table(policy.table), strict=True)
        return [
            [(operation, chance, min(1, level / most)) for operation, chance, level in column] for column in columns
        ]
    return [
        [(operation, policy.probability, policy.magnitude / 10) for operation in OPERATIONS[policy.form]]
    ] * policy.layers


def _layer(
    seed: int, policy: Policy, positions: Whole, index: int, row: list[Entry], chosen: Whole, side: int
) -> Layer:
    """One operation of `row` for each image, where its chance comes up."""
    _, high, low, sign = keyed.words(keyed.key(seed, "policy"), positions, index)
    down, right, *_ = keyed.words(keyed.key(seed, "policy cutout"), positions, index)
    happens = keyed.uniforms(high, low) < np.array([chance for _, chance, _ in row])[chosen]
    shares = np.array([share for *_, share in row])[chosen]
    if isinstance(policy, RandAugment) and policy.magnitude_std:
        first, second, *_ = keyed.words(keyed.key(seed, "policy spread"), positions, index)
        shares = np.clip(shares + policy.magnitude_std / 10 * keyed.normals_of(first, second), 0, 1)
    signs = 1 - 2 * (sign >> 31).astype(np.float64)
    kinds = np.zeros(len(positions), np.int64)
    numbers = np.zeros((NUMBERS, len(positions)), np.int64)
    for place, (operation, *_) in enumerate(row):
        here = np.flatnonzero(happens & (chosen == place))
        if not len(here) or operation == "identity":
            continue
        kinds[here] = KINDS.index("affine" if operation in MOVES else operation)
        if operation in MOVES:
            numbers[:, here] = matrices(operation, _reach(policy, operation, shares[here], side) * signs[here], side)
        elif operation == "cutout":
            length = np.rint(shares[here] * side * 80 / 224).astype(np.int64)
            numbers[:4, here] = square(down[here], right[here], length, side)
        else:
            numbers[0, here] = np.rint(_amount(policy.form, operation, shares[here], signs[here]))
    return Layer(kinds, numbers)


def _reach(policy: Policy, operation: str, shares: Numbers, side: int) -> Numbers:
    """How far pixels move, one way or the other: by up to 0.3 of a row, 30 degrees, or what REACH says in pixels, which
    are whole but for timm's."""
    if operation.startswith("shear"):
        return 0.3 * shares
    if operation == "rotate":
        return 30 * shares
    pixels = REACH[policy.name, policy.form] * side * shares
    return pixels if policy.form == "timm" else np.floor(pixels)


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


def _amount(form: str, operation: str, shares: Numbers, signs: Numbers) -> Numbers:
    """The one number of an operation: a factor in 65536ths, a threshold, what is added, or bits that are kept."""
    match operation, form:
        case "solarize", "torch":
            return np.ceil(np.round(255 * (1 - shares), 6))
        case "solarize", "timm":
            return 256 - np.floor(256 * shares)
        case "solarize", _:
            return np.floor(256 * shares)
        case "solarize-add", _:
            return np.floor(110 * shares)
        case "posterize", "torch":
            return 8 - np.rint(4 * shares)
        case "posterize", "timm":
            return 4 - np.floor(4 * shares)
        case "posterize", _:
            return np.floor(4 * shares)
        case (("contrast" | "color" | "brightness" | "sharpness"), "tensorflow"):
            return ONE * (0.1 + 1.8 * shares)
        case (("contrast" | "color" | "brightness" | "sharpness"), _):
            return ONE * (1 + 0.9 * shares * signs)
        case _:
            return np.zeros(len(shares))
