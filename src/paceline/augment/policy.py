"""AutoAugment and RandAugment: which operation each image gets and how much of it, keyed to its position.

All parameters are integers (fractions in 65536ths), so that every device computes the same pixels from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline import keyed
from paceline.augment.erase import squares
from paceline.numpy_types import Float64s, Int64s
from paceline.settings.augment import AutoAugment, Policy, RandAugment
from paceline.settings.recipe import Recipe

Entry = tuple[str, float, float]
"""An operation, its probability, and its magnitude (0 to 1)."""

ONE = 1 << 16
"""What 1 is in 65536ths."""
PARAMETERS = 6
"""How many integers go with an operation: a matrix, a box, or one amount."""
KINDS = (
    "none", "affine", "autocontrast", "invert", "equalize", "solarize", "solarize-add", "posterize", "contrast",
    "color", "brightness", "sharpness", "cutout",
)  # fmt: skip
"""What is done to pixels; every operation that moves pixels is 'affine'."""
AFFINE = ("shear-x", "shear-y", "translate-x", "translate-y", "rotate")

TORCH = (
    "identity", *AFFINE, "brightness", "color", "contrast", "sharpness", "posterize", "solarize", "autocontrast",
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
"""How far an image moves at most, as a fraction of its side; papers give pixels, for images of 331 or 224."""

# Operation, probability and level (0 to 9), twice: the pairs as the AutoAugment paper prints them, and EfficientNet's.
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
PAIRS = {"imagenet": IMAGENET, "cifar10": CIFAR10, "efficientnet": EFFICIENTNET}


@dataclass(frozen=True)
class PolicyLayer:
    """One operation for each image."""

    kinds: Int64s
    """The index in KINDS of each image's operation."""
    parameters: Int64s
    """PARAMETERS rows that go with it."""

    def split(self, sizes: list[int]) -> list[PolicyLayer]:
        """The layer of each run of so many images."""
        ends = np.cumsum(sizes)[:-1]
        pieces = zip(np.split(self.kinds, ends), np.split(self.parameters, ends, axis=1), strict=True)
        return [PolicyLayer(kinds, parameters) for kinds, parameters in pieces]

    def grouped(self) -> tuple[list[tuple[str, int]], Int64s]:
        """How many images get each kind of operation, and, in that order, each image's index and parameters."""
        order = np.argsort(self.kinds, kind="stable")
        counts = np.bincount(self.kinds, minlength=len(KINDS)).tolist()
        order = order[counts[0] :]  # those of kind 'none' come first
        groups = [(kind, count) for kind, count in zip(KINDS[1:], counts[1:], strict=True) if count]
        return groups, np.vstack([order, self.parameters[:, order]])


def table(name: str) -> list[tuple[tuple[str, float, int], tuple[str, float, int]]]:
    """The published pairs of a table: operation, probability and level of each."""
    pairs = []
    for line in PAIRS[name].split(","):
        a, b, c, d, e, f = line.split()
        pairs.append(((a, float(b), int(c)), (d, float(e), int(f))))
    return pairs


def draw_policy(recipe: Recipe, positions: Int64s, side: int) -> list[PolicyLayer]:
    """What the images at these positions get, in each layer of the recipe's policy; `side` is theirs in pixels."""
    policy = recipe.augment.policy
    if policy is None:
        return []
    layers = []
    for index, entries in enumerate(_entries(policy)):
        # The two operations of a pair are chosen together.
        word = keyed.words(keyed.key(recipe.seed, "policy"), positions, 0 if policy.name == "autoaugment" else index)[0]
        chosen = keyed.integers(word, len(entries))
        layers.append(_layer(recipe.seed, policy, positions, index, entries, chosen, side))
    return layers


def _entries(policy: Policy) -> list[list[Entry]]:
    """What each layer of a policy chooses from."""
    if isinstance(policy, AutoAugment):
        most = 9 if policy.form == "torch" else 10
        columns = zip(*table(policy.table), strict=True)
        return [
            [(operation, probability, min(1, level / most)) for operation, probability, level in column]
            for column in columns
        ]
    return [
        [(operation, policy.probability, policy.magnitude / 10) for operation in OPERATIONS[policy.form]]
    ] * policy.layers


def _layer(
    seed: int, policy: Policy, positions: Int64s, index: int, entries: list[Entry], chosen: Int64s, side: int
) -> PolicyLayer:
    """The chosen operation for each image, where its probability comes up."""
    _, high, low, sign = keyed.words(keyed.key(seed, "policy"), positions, index)
    down, right, *_ = keyed.words(keyed.key(seed, "policy cutout"), positions, index)
    happens = keyed.uniforms(high, low) < np.array([probability for _, probability, _ in entries])[chosen]
    magnitudes = np.array([magnitude for *_, magnitude in entries])[chosen]
    if isinstance(policy, RandAugment) and policy.magnitude_std:
        first, second, *_ = keyed.words(keyed.key(seed, "policy spread"), positions, index)
        magnitudes = np.clip(magnitudes + policy.magnitude_std / 10 * keyed.normals_of(first, second), 0, 1)
    signs = 1 - 2 * (sign >> 31).astype(np.float64)
    kinds = np.zeros(len(positions), np.int64)
    parameters = np.zeros((PARAMETERS, len(positions)), np.int64)
    for entry, (operation, *_) in enumerate(entries):
        here = np.flatnonzero(happens & (chosen == entry))
        if not len(here) or operation == "identity":
            continue
        kinds[here] = KINDS.index("affine" if operation in AFFINE else operation)
        if operation in AFFINE:
            amounts = _reach(policy, operation, magnitudes[here], side) * signs[here]
            parameters[:, here] = matrices(operation, amounts, side)
        elif operation == "cutout":
            length = np.rint(magnitudes[here] * side * 80 / 224).astype(np.int64)
            parameters[:4, here] = squares(down[here], right[here], length, side)
        else:
            parameters[0, here] = np.rint(_amount(policy.form, operation, magnitudes[here], signs[here]))
    return PolicyLayer(kinds, parameters)


def _reach(policy: Policy, operation: str, magnitudes: Float64s, side: int) -> Float64s:
    """How far pixels move, one way or the other: by up to 0.3 of a row, 30 degrees, or what REACH says in pixels, which
    are whole except in timm's form."""
    if operation.startswith("shear"):
        return 0.3 * magnitudes
    if operation == "rotate":
        return 30 * magnitudes
    pixels = REACH[policy.name, policy.form] * side * magnitudes
    return pixels if policy.form == "timm" else np.floor(pixels)


def matrices(operation: str, amounts: Float64s, side: int) -> Int64s:
    """Where a pixel comes from: column = a x + b y + c and row = d x + e y + f in 65536ths, for column x and row y.

    A pixel is looked up at its center, so c and f include half a pixel of each. Shears keep the upper left corner where
    it is, and rotations (degrees, counterclockwise) the center.
    """
    one, zero = np.ones(len(amounts)), np.zeros(len(amounts))
    entries: dict[str, Callable[[], list[Float64s]]] = {
        "shear-x": lambda: [one, amounts, zero, zero, one, zero],
        "shear-y": lambda: [one, zero, zero, amounts, one, zero],
        "translate-x": lambda: [one, zero, amounts, zero, one, zero],
        "translate-y": lambda: [one, zero, zero, zero, one, amounts],
        "rotate": lambda: _rotation(np.deg2rad(amounts), side / 2),
    }
    a, b, c, d, e, f = entries[operation]()
    return np.floor(ONE * np.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2]) + 0.5).astype(np.int64)


def _rotation(angles: Float64s, center: float) -> list[Float64s]:
    cosine, sine = np.cos(angles), np.sin(angles)
    return [cosine, -sine, center * (1 - cosine + sine), sine, cosine, center * (1 - cosine - sine)]


def _amount(form: str, operation: str, magnitudes: Float64s, signs: Float64s) -> Float64s:
    """The one parameter of an operation: a factor in 65536ths, a threshold, what is added, or the bits to keep."""
    match operation, form:
        case "solarize", "torch":
            return np.ceil(np.round(255 * (1 - magnitudes), 6))
        case "solarize", "timm":
            return 256 - np.floor(256 * magnitudes)
        case "solarize", _:
            return np.floor(256 * magnitudes)
        case "solarize-add", _:
            return np.floor(110 * magnitudes)
        case "posterize", "torch":
            return 8 - np.rint(4 * magnitudes)
        case "posterize", "timm":
            return 4 - np.floor(4 * magnitudes)
        case "posterize", _:
            return np.floor(4 * magnitudes)
        case (("contrast" | "color" | "brightness" | "sharpness"), "tensorflow"):
            return ONE * (0.1 + 1.8 * magnitudes)
        case (("contrast" | "color" | "brightness" | "sharpness"), _):
            return ONE * (1 + 0.9 * magnitudes * signs)
        case _:
            return np.zeros(len(magnitudes))
