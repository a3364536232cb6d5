"""Draws images in groups under their names: the contact sheet of a data set, and what the network saw in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.numpy_types import UInt8s

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

_GAP, _BETWEEN, _CAPTION = 12, 2, 14
"""Pixels between groups, between the images of a group, and for the name above them."""


def contact_sheet(groups: Sequence[tuple[str, list[UInt8s]]], columns: int, scale: int = 1) -> PILImage:
    """Images of one size in groups of one size, so many times as large: each group under its name, one image below the
    other."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415 - who draws nothing does without it

    side, count = scale * groups[0][1][0].shape[0], len(groups[0][1])
    wide, tall = side + _GAP, _CAPTION + count * (side + _BETWEEN) - _BETWEEN + _GAP
    rows = -(-len(groups) // columns)
    page = Image.new("RGB", (columns * wide + _GAP, rows * tall + _GAP), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default()
    for number, (name, images) in enumerate(groups):
        left, top = number % columns * wide + _GAP, number // columns * tall + _GAP
        pen.text((left, top), _cut_to(side, name, lambda text: pen.textlength(text, font)), "black", font)
        for below, pixels in enumerate(images):
            # Of one channel, or of others than colors, the first is shown in gray.
            image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
            place = left, top + _CAPTION + below * (side + _BETWEEN)
            page.paste(image.resize((side, side), Image.Resampling.NEAREST), place)
    return page


def _cut_to(width: int, name: str, length: Callable[[str], float]) -> str:
    """As much of a name as fits; characters that the font may not have are shown by their numbers."""
    text = name.encode("ascii", "backslashreplace").decode()
    while text and length(text) > width:
        text = text[:-1]
    return text
