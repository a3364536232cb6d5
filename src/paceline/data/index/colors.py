"""Pictures of Pillow's many modes as such of 8 bits a color, the only ones that are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


class NoColors(Exception):
    """What these pixels would look like is not known, for the reason that is said."""


def in_colors(image: Image.Image) -> Image.Image:
    """The picture in RGB; of 16 bits of gray the higher 8 count, as Pillow has it of colors."""
    from PIL import Image  # noqa: PLC0415 - most data sets never need it

    # Pillow itself would cut everything above 255 off, and most of the picture would be white. Some of its versions
    # read 16 bits of these formats, which have no more, as 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise NoColors("its pixels are numbers of 32 bits on no known scale; write it with 8 or 16 bits")
    return image.convert("RGB")
