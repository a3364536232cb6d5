"""Prepares one image for a pack: split into restart tiles without loss, made smaller, or kept as it is."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from paceline.data.index.image_header import ORIENTATION, exif_orientation, open_image, to_rgb
from paceline.data.index.table import Flag
from paceline.data.pack import tiles
from paceline.errors import DataError
from paceline.files import disk_faults, read_exactly

_TILED = Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED
_LONGEST_SIDE = 65_500
"""A JPEG cannot hold more pixels a side."""


@dataclass(frozen=True)
class LossyPreset:
    """Makes images smaller: the longest side in pixels, and the quality of the JPEG (1 to 100, 4:2:0)."""

    max_side: int | None = 500
    quality: int = 90


@dataclass(frozen=True)
class SourceImage:
    """An image where it lies, with what the index knows of it, and what to make of it."""

    path: str
    offset: int
    length: int
    width: int
    height: int
    flags: int
    preset: LossyPreset | None = None
    as_it_is: bool = False
    """Whether it goes into the pack unchanged, whatever it may be."""


@dataclass(frozen=True)
class PackedImage:
    """An image as it goes into the pack."""

    encoded: bytes
    width: int
    height: int
    flags: int


def transcode(image: SourceImage) -> PackedImage:
    """Read an image and turn it into what a pack holds; a damaged JPEG may end the process."""
    encoded = read_encoded(Path(image.path), image.offset, image.length)
    flags = Flag(image.flags)
    unchanged = PackedImage(encoded, image.width, image.height, image.flags)
    if image.as_it_is or Flag.UNREADABLE in flags:
        return unchanged
    smaller = _shrink(encoded, image.preset) if image.preset else None
    resized = smaller is not None and (smaller.width, smaller.height) != (image.width, image.height)
    if smaller is not None and (resized or len(smaller.encoded) < len(encoded)):
        return PackedImage(smaller.encoded, smaller.width, smaller.height, int(_TILED | (flags & ~_TILED)))
    if Flag.JPEG not in flags or Flag.TILED in flags:
        return unchanged
    tiled = tiles.retile(encoded, keep_exif=Flag.TURNED in flags)
    return unchanged if tiled is None else PackedImage(tiled, image.width, image.height, int(flags | _TILED))


def read_encoded(path: Path, offset: int, length: int) -> bytes:
    """Read the bytes of an image; a DataError names a file that cannot be read or is too short."""
    with disk_faults(DataError, path, "cannot be read"):
        return read_exactly(path, offset, length)


def _shrink(encoded: bytes, preset: LossyPreset) -> PackedImage | None:
    """Encode an image with fewer pixels and bytes, in tiles; None where Pillow or JPEG cannot do it."""
    from PIL import Image, ImageFile  # noqa: PLC0415 - lossless packs do without Pillow

    ImageFile.MAXBLOCK = 1 << 24  # Pillow must write an optimized JPEG in one go
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_image(encoded) as opened:
                orientation = exif_orientation(opened)
                image = opened.copy() if opened.mode in {"RGB", "L"} else to_rgb(opened)
    except Exception:  # noqa: BLE001 - a damaged file makes Pillow's many readers raise anything
        return None
    longest = max(image.size)
    if preset.max_side is not None and longest > preset.max_side:
        width, height = (max(1, round(side * preset.max_side / longest)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    if max(image.size) > _LONGEST_SIDE:
        return None
    unit = 8 if image.mode == "L" else 16
    exif = Image.Exif()
    if orientation in range(2, 9):
        exif[ORIENTATION] = orientation
    out = io.BytesIO()
    image.save(
        out, "JPEG", quality=preset.quality, optimize=True, subsampling="4:2:0", exif=exif,
        restart_marker_blocks=tiles.tile_interval(-(-image.width // unit), unit),
    )  # fmt: skip
    return PackedImage(tiles.add_tile_lengths(out.getvalue()), image.width, image.height, int(_TILED))
