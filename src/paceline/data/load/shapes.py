"""The built-in data set `shapes`: ten kinds of figure on cluttered backgrounds, drawn from keyed random numbers.

Image i of a split is a pure function of i, made only of operations that IEEE 754 defines to the last bit (+ - * / and
square roots, never sines), so every machine draws the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import keyed

# All are float32 when run; NumPy's annotations lose track of that wherever a plain number joins in.
Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

SIDE = 32
SPLITS = ("train", "validation")

_SEED = 0
_CHANNELS = 3
# The working arrays of this many images fit a processor's cache, which is faster and keeps memory small.
_CHUNK = 100

# Lengths are in pixels, lightness and its differences in fractions of the full range.
_RADIUS = (6.0, 12.0)
_STROKES = 4
_STROKE_HALF_LENGTH = (1.0, 6.0)
_STROKE_HALF_WIDTH = (0.5, 1.2)
_BACKGROUND = (0.0, 0.6)
_CONTRAST = 0.25
_GRADIENT = 0.3
_NOISE = 0.25


def draw_shapes(split: str, count: int) -> tuple[NDArray[np.uint8], Integers]:
    """The first `count` images (count, 32, 32, 3) of a split ("train" or "validation") and their labels."""
    if split not in SPLITS:
        raise ValueError(f"shapes has no split {split!r}; it has {' and '.join(SPLITS)}")
    indices = np.arange(count, dtype=np.int64)
    labels = keyed.integers(keyed.words(_key(split, "label"), indices)[0], len(CLASSES))
    images = np.empty((count, SIDE, SIDE, _CHANNELS), np.uint8)
    for start in range(0, count, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk] = _paint(split, indices[chunk], labels[chunk])
    return images, labels


def _paint(split: str, indices: Integers, labels: Integers) -> NDArray[np.uint8]:
    """The images of these indices: a background, strokes, the shape, then noise."""
    dark, light, slope = np.moveaxis(_uniforms(split, "colour", indices, 3, _CHANNELS, 1, 1), 1, 0)
    background = _between(_BACKGROUND, dark)
    # Lighter than the background in every channel, whatever the two colors: a person always sees the shape.
    color = background + _CONTRAST + (1 - _CONTRAST - background) * light
    ramp, _ = _coordinates(np.zeros((len(indices), 2), np.float32), _uniforms(split, "gradient", indices, 1)[:, 0])
    canvas = background + _between((-_GRADIENT / SIDE, _GRADIENT / SIDE), slope) * ramp[:, None]

    strokes = _uniforms(split, "stroke", indices, _STROKES, 5)
    stroke_colors = _uniforms(split, "stroke colour", indices, _STROKES, _CHANNELS, 1, 1)
    for stroke in range(_STROKES):
        _blend(canvas, _stroke(strokes[:, stroke]), stroke_colors[:, stroke])
    _blend(canvas, _shape(_uniforms(split, "shape", indices, 4), labels), color)
    canvas += _noise(split, indices)
    levels: NDArray[np.uint8] = np.rint(np.clip(canvas, 0, 1) * 255).astype(np.uint8)
    return levels.transpose(0, 2, 3, 1)


def _blend(canvas: Floats, distance: Floats, color: Floats) -> None:
    """Paints the inside of a figure, given each pixel's distance from its edge; pixels on the edge mix both colors."""
    cover = np.clip(0.5 - distance, 0, 1)[:, None]
    canvas += cover * (color - canvas)


def _stroke(chosen: Floats) -> Floats:
    """Distances in pixels from short thick lines with round ends, anywhere in the image."""
    half_length = _between(_STROKE_HALF_LENGTH, chosen[:, 3, None, None])
    half_width = _between(_STROKE_HALF_WIDTH, chosen[:, 4, None, None])
    along, across = _coordinates(_between((-SIDE / 2, SIDE / 2), chosen[:, 1:3]), chosen[:, 0])
    return _length(np.maximum(abs(along) - half_length, 0), across) - half_width


def _shape(chosen: Floats, labels: Integers) -> Floats:
    """Distances in pixels from the shapes of these labels, each wholly inside its image."""
    radius = _between(_RADIUS, chosen[:, 3, None, None])
    center = (SIDE / 2 - radius[:, 0]) * _between((-1.0, 1.0), chosen[:, 1:3])
    x, y = _coordinates(center, chosen[:, 0])
    distance = np.empty_like(x)
    for label, figure in enumerate(_FIGURES.values()):
        mine = labels == label
        distance[mine] = figure(x[mine] / radius[mine], y[mine] / radius[mine]) * radius[mine]
    return distance


def _coordinates(center: Floats, turn: Floats) -> tuple[Floats, Floats]:
    """Every pixel's place (n, 32, 32) in frames with these centers, turned by fractions of a full circle."""
    cosine, sine = _DIRECTIONS[(turn * len(_DIRECTIONS)).astype(np.int64)].T[:, :, None, None]
    pixels = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    x = pixels[None, None, :] - center[:, 0, None, None]
    y = pixels[None, :, None] - center[:, 1, None, None]
    return cosine * x + sine * y, cosine * y - sine * x


def _noise(split: str, indices: Integers) -> Floats:
    """Noise spread evenly within half of _NOISE either way, from one random byte for each channel of each pixel."""
    # One look-up gives sixteen bytes, so every image has this many positions of its own.
    each = SIDE * SIDE * _CHANNELS // 16
    words = keyed.words(_key(split, "noise"), indices[:, None] * each + np.arange(each))
    levels = np.stack(words, axis=-1).astype("<u4").view(np.uint8).reshape(-1, _CHANNELS, SIDE, SIDE)
    return (levels.astype(np.float32) - 127.5) * (_NOISE / 255)


def _key(split: str, purpose: str) -> int:
    return keyed.key(_SEED, "shapes", split, purpose)


def _uniforms(split: str, purpose: str, indices: Integers, *shape: int) -> Floats:
    """Numbers in [0, 1), an array of this shape for each image; of 24 bits each, which float32 holds exactly."""
    size, key = math.prod(shape), _key(split, purpose)
    words = [word for index in range(math.ceil(size / 4)) for word in keyed.words(key, indices, index)]
    whole = keyed.integers(np.stack(words[:size], axis=1), 1 << 24)
    return (whole.astype(np.float32) * 2.0**-24).reshape(-1, *shape)


def _between(bounds: tuple[float, float], fraction: Floats) -> Floats:
    return bounds[0] + (bounds[1] - bounds[0]) * fraction


def _directions(doublings: int) -> Floats:
    """Unit vectors evenly round the circle (4 * 2^doublings, 2), by halving angles: cosines without a cosine."""
    points = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float64)
    for _ in range(doublings):
        middles = points + np.roll(points, -1, axis=0)
        middles /= _length(middles[:, :1], middles[:, 1:])
        points = np.stack([points, middles], axis=1).reshape(-1, 2)
    return points.astype(np.float32)


def _length(x: Floats, y: Floats) -> Floats:
    # Not np.hypot, whose last bit is up to the machine's mathematics library.
    length: Floats = np.sqrt(x * x + y * y)
    return length


def _both(first: Floats, second: Floats) -> Floats:
    """The distance from what two figures have in common."""
    larger: Floats = np.maximum(first, second)
    return larger


def _either(first: Floats, second: Floats) -> Floats:
    """The distance from two figures taken together."""
    smaller: Floats = np.minimum(first, second)
    return smaller


def _disc(x: Floats, y: Floats) -> Floats:
    return _length(x, y) - 0.9


def _ring(x: Floats, y: Floats) -> Floats:
    return abs(_length(x, y) - 0.73) - 0.22


def _square(x: Floats, y: Floats) -> Floats:
    return _both(abs(x), abs(y)) - 0.7


def _frame(x: Floats, y: Floats) -> Floats:
    return abs(_both(abs(x), abs(y)) - 0.53) - 0.17


def _triangle(x: Floats, y: Floats) -> Floats:
    slant = abs(x) * math.sqrt(0.75)
    return _both(slant + 0.5 * y, -y) - 0.5


def _star(x: Floats, y: Floats) -> Floats:
    # A pentagram is the points on the inner side of at least four of its five lines: the second farthest decides.
    cosines = (math.sqrt(5) - 1) / 4, (math.sqrt(5) + 1) / 4
    sines = [math.sqrt(1 - cosine * cosine) for cosine in cosines]
    (wide, narrow), (low, high) = (x * sine for sine in sines), (y * cosine for cosine in cosines)
    lines = np.stack([-y, wide - low, -wide - low, narrow + high, -narrow + high])
    second: Floats = np.sort(lines, axis=0)[-2]
    return second - cosines[0]


def _cross(x: Floats, y: Floats) -> Floats:
    return _both(_both(abs(x), abs(y)) - 0.95, _either(abs(x), abs(y)) - 0.27)


def _dome(x: Floats, y: Floats) -> Floats:
    return _both(_length(x, y + 0.4) - 0.9, -0.4 - y)


def _crescent(x: Floats, y: Floats) -> Floats:
    return _both(_length(x, y) - 0.95, 0.75 - _length(x - 0.5, y))


def _heart(x: Floats, y: Floats) -> Floats:
    # A square standing on a corner, with a half disc on each of the other two sides.
    across, up = x + 0.15, y + 0.15
    discs = _either(_length(across - 0.5, up), _length(across, up - 0.5))
    return _either(_both(abs(across), abs(up)), discs) - 0.5


# Each takes coordinates in units of the shape's radius and gives the distance from its edge, negative inside. None is
# the mirror image of another, so flips keep the class.
_FIGURES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "frame": _frame,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "dome": _dome,
    "crescent": _crescent,
    "heart": _heart,
}
_DIRECTIONS = _directions(8)

CLASSES = tuple(_FIGURES)
