"""The program that prepares images for an exported network gives the pixels that the evaluation saw."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.augment.resized_crop import evaluation_boxes
from paceline.data.index.image_header import parse_header
from paceline.data.index.table import Flag
from paceline.data.load.decode import decode_into
from paceline.exporting.preprocess import preprocess
from paceline.settings.data import Center, Squash
from pictures_made import BAD, make_pictures

PICTURES = [made for made in make_pictures(40, 4) if made.odd not in (*BAD, "damaged")]


def evaluated(encoded: bytes, how: Center | Squash, side: int, resize: Any, turn: bool) -> Any:
    """The pixels of an image as a validation sees them."""
    width, height, flags = parse_header(encoded)
    shown = (height, width) if turn and flags & Flag.ACROSS else (width, height)
    (box,) = evaluation_boxes(how, side, *(np.array([edge], np.int64) for edge in shown))
    pixels = np.empty((side, side, 3), np.uint8)
    decode_into(encoded, int(flags), width, height, box, False, resize, pixels, turn=turn)
    return pixels


def settings_of(how: Center | Squash, side: int, resize: str, turn: bool) -> dict[str, Any]:
    short, fraction = (how.shorter(side), None) if isinstance(how, Center) else (None, how.fraction)
    orientation = "honor" if turn else "ignore"
    return {"side": side, "resize": resize, "orientation": orientation, "short": short, "fraction": fraction}


@pytest.mark.parametrize("resize", ["bilinear", "bicubic"])
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize(
    ("how", "side"),
    [(Center(name="center"), 32), (Center(name="center", short=40), 17), (Squash(name="squash", fraction=0.8), 24)],
)
def test_every_pixel_of_odd_and_ordinary_images_is_the_same(
    how: Center | Squash, side: int, turn: bool, resize: str
) -> None:
    for made in PICTURES:
        pixels = preprocess(made.bytes, settings_of(how, side, resize, turn))
        assert np.array_equal(pixels, evaluated(made.bytes, how, side, resize, turn)), made.odd or made.key


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_the_evaluation_turns_it(orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    for how in (Center(name="center"), Squash(name="squash")):
        expected = evaluated(file.getvalue(), how, 20, "bilinear", True)
        assert np.array_equal(preprocess(file.getvalue(), settings_of(how, 20, "bilinear", True)), expected)


def test_an_image_that_was_opened_is_taken_too() -> None:
    made = PICTURES[-1]
    settings = settings_of(Center(name="center"), 16, "bilinear", False)
    with Image.open(io.BytesIO(made.bytes)) as image:
        assert np.array_equal(preprocess(image, settings), preprocess(made.bytes, settings))
