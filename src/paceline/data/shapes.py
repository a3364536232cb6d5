"""The built-in data set `shapes`: ten kinds of figure on cluttered backgrounds, drawn from keyed random numbers.

Image i of a split is a pure function of i, and takes only operations that IEEE 754 makes exact (+ - * / and square
roots, never sines), so every machine draws the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline import keyed

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

SIDE = 32
SPLITS = ("train", "validation")

_SEED = 0
_CHANNELS = 3
# The working arrays of this many images fit a processor's cache, which is faster and keeps memory small.
_CHUNK = 100
# Lengths are in pixels, colours and their differences in shares of the full range.
_RADIUS = (7.0, 12.0)
_STROKES = 4
_STROKE_HALF_LENGTH = (1.0, 6.0)
_STROKE_HALF_WIDTH = (0.5, 1.2)
_CONTRAST = 0.3
_GRADIENT = 0.3
_NOISE = 0.2


def draw(split: str, count: int) -> tuple[NDArray[np.uint8], Integers]:
    """The first `count` images (count, 32, 32, 3) of a split ("train" or "validation") and their labels."""
    if split not in SPLITS:
        raise ValueError(f"shapes has no split {split!r}; it has {' and '.join(SPLITS)}")
    numbers = np.arange(count, dtype=np.int64)
    labels = keyed.integers(keyed.words(_key(split, "label"), numbers)[0], len(CLASSES))
    images = np.empty((count, SIDE, SIDE, _CHANNELS), np.uint8)
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        images[part] = _paint(split, numbers[part], labels[part])
    return images, labels


def _paint(split: str, numbers: Integers, labels: Integers) -> NDArray[np.uint8]:
    """The images of these numbers: a background, strokes, the shape, then noise."""
    first, step, slope = np.moveaxis(_uniforms(split, "colour", numbers, 3, _CHANNELS, 1, 1), 1, 0)
    # Going round the range keeps each channel of the shape _CONTRAST or more from the background, and evenly spread.
    colour = (first + _between((_CONTRAST, 1 - _CONTRAST), step)) % 1
    place = _uniforms(split, "gradient", numbers, 3)
    ramp, _ = _coordinates(np.zeros_like(place[:, 1:]), place[:, 0])
    canvas = first + _between((-_GRADIENT / SIDE, _GRADIENT / SIDE), slope) * ramp[:, None]

    strokes = _uniforms(split, "stroke", numbers, _STROKES, 5)
    stroke_colours = _uniforms(split, "stroke colour", numbers, _STROKES, _CHANNELS, 1, 1)
    for stroke in range(_STROKES):
        _blend(canvas, _stroke(strokes[:, stroke]), stroke_colours[:, stroke])
    _blend(canvas, _shape(_uniforms(split, "shape", numbers, 4), labels), colour)
    canvas += _noise(split, numbers)
    levels = np.rint(np.clip(canvas, 0, 1) * 255).astype(np.uint8)
    return levels.transpose(0, 2, 3, 1)


def _blend(canvas: Floats, distance: Floats, colour: Floats) -> None:
    """Paints the inside of a figure, given each pixel's distance from its edge; pixels on the edge mix both colours."""
    cover = np.clip(0.5 - distance, 0, 1)[:, None]
    canvas += cover * (colour - canvas)


def _stroke(chosen: Floats) -> Floats:
    """Distances in pixels from short thick lines with round ends, anywhere in the image."""
    half_length = _between(_STROKE_HALF_LENGTH, chosen[:, 3, None, None])
    half_width = _between(_STROKE_HALF_WIDTH, chosen[:, 4, None, None])
    along, across = _coordinates(_between((-SIDE / 2, SIDE / 2), chosen[:, 1:3]), chosen[:, 0])
    return _length(np.maximum(abs(along) - half_length, 0), across) - half_width


def _shape(chosen: Floats, labels: Integers) -> Floats:
    """Distances in pixels from the shapes of these labels, each wholly inside its image."""
    radius = _between(_RADIUS, chosen[:, 3, None])
    centre = (SIDE / 2 - radius) * _between((-1.0, 1.0), chosen[:, 1:3])
    x, y = _coordinates(centre, chosen[:, 0])
    scale = radius[:, :, None]
    distance = np.empty_like(x)
    for label, measure in enumerate(_DISTANCES.values()):
        mine = labels == label
        distance[mine] = measure(x[mine] / scale[mine], y[mine] / scale[mine]) * scale[mine]
    return distance


def _coordinates(centre: Floats, turn: Floats) -> tuple[Floats, Floats]:
    """Every pixel's place (n, 32, 32) in frames with these centres, turned by shares of a full circle."""
    cosine, sine = _DIRECTIONS[(turn * len(_DIRECTIONS)).astype(np.int64)].T[:, :, None, None]
    pixels = np.arange(SIDE, dtype=np.float32) - ((SIDE - 1) / 2)
    x = pixels[None, None, :] - centre[:, 0, None, None]
    y = pixels[None, :, None] - centre[:, 1, None, None]
    return cosine * x + sine * y, cosine * y - sine * x


def _noise(split: str, numbers: Integers) -> Floats:
    """An even spread of noise for every channel of every pixel, one random byte each."""
    size = SIDE * SIDE * _CHANNELS
    # One look-up gives sixteen bytes, so an image takes size / 16 positions of its own.
    positions = numbers[:, None] * (size // 16) + np.arange(size // 16)
    words = np.stack(keyed.words(_key(split, "noise"), positions), axis=-1)
    levels = words.astype("<u4").view(np.uint8).reshape(-1, _CHANNELS, SIDE, SIDE)
    return (levels.astype(np.float32) - 127.5) * (_NOISE / 255)


def _key(split: str, purpose: str) -> int:
    return keyed.key(_SEED, "shapes", split, purpose)


def _uniforms(split: str, purpose: str, numbers: Integers, *shape: int) -> Floats:
    """Numbers in [0, 1), an array of the given shape for each image; 24 bits each, which float32 holds exactly."""
    size = math.prod(shape)
    words = [word for index in range(-(-size // 4)) for word in keyed.words(_key(split, purpose), numbers, index)]
    whole = keyed.integers(np.stack(words[:size], axis=1), 1 << 24)
    return (whole.astype(np.float32) * (2.0**-24)).reshape(-1, *shape)


def _between(bounds: tuple[float, float], share: Floats) -> Floats:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _length(x: Floats, y: Floats) -> Floats:
    # Not np.hypot, whose last bit is the mathematics library's own.
    return np.sqrt(x * x + y * y)


def _directions(doublings: int) -> Floats:
    """Unit vectors evenly round the circle (4 * 2^doublings, 2), by bisecting angles: cosines without a cosine."""
    points = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float64)
    for _ in range(doublings):
        middles = points + np.roll(points, -1, axis=0)
        middles /= np.sqrt(middles[:, :1] * middles[:, :1] + middles[:, 1:] * middles[:, 1:])
        points = np.stack([points, middles], axis=1).reshape(-1, 2)
    return points.astype(np.float32)


_DIRECTIONS = _directions(8)

# The outward normals of a triangle's and of a pentagon's sides.
_THREE = [(0.0, -1.0), (math.sqrt(0.75), 0.5), (-math.sqrt(0.75), 0.5)]
_COSINE_72, _COSINE_36 = (math.sqrt(5) - 1) / 4, (math.sqrt(5) + 1) / 4
_SINE_72, _SINE_36 = math.sqrt(1 - _COSINE_72 * _COSINE_72), math.sqrt(1 - _COSINE_36 * _COSINE_36)
_FIVE = [
    (0.0, -1.0),
    (_SINE_72, -_COSINE_72),
    (_SINE_36, _COSINE_36),
    (-_SINE_36, _COSINE_36),
    (-_SINE_72, -_COSINE_72),
]


def _projections(x: Floats, y: Floats, normals: list[tuple[float, float]]) -> Floats:
    return np.stack([a * x + b * y for a, b in normals])


def _disc(x: Floats, y: Floats) -> Floats:
    return _length(x, y) - 0.9


def _ring(x: Floats, y: Floats) -> Floats:
    return abs(_length(x, y) - 0.73) - 0.22


def _square(x: Floats, y: Floats) -> Floats:
    return np.maximum(abs(x), abs(y)) - 0.7


def _frame(x: Floats, y: Floats) -> Floats:
    return abs(np.maximum(abs(x), abs(y)) - 0.55) - 0.17


def _triangle(x: Floats, y: Floats) -> Floats:
    return _projections(x, y, _THREE).max(axis=0) - 0.5


def _star(x: Floats, y: Floats) -> Floats:
    # A pentagram is what at least four of a pentagon's five sides have on their inner hand.
    return np.sort(_projections(x, y, _FIVE), axis=0)[-2] - 0.36


def _cross(x: Floats, y: Floats) -> Floats:
    longer, shorter = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
    return np.maximum(longer - 0.95, shorter - 0.27)


def _dome(x: Floats, y: Floats) -> Floats:
    return np.maximum(_length(x, y + 0.45) - 1, -0.45 - y)


def _crescent(x: Floats, y: Floats) -> Floats:
    return np.maximum(_length(x, y) - 0.95, 0.75 - _length(x - 0.5, y))


def _heart(x: Floats, y: Floats) -> Floats:
    # A square, with a half disc on each of two sides that meet.
    side, a, b = 0.5, x + 0.15, y + 0.15
    discs = np.minimum(_length(a - side, b), _length(a, b - side))
    return np.minimum(np.maximum(abs(a), abs(b)), discs) - side


# Each takes coordinates in units of the shape's radius and gives the distance from its edge, negative inside.
_DISTANCES: dict[str, Callable[[Floats, Floats], Floats]] = {
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

CLASSES = tuple(_DISTANCES)
