"""One picture on its way into a pack: in restart tiles without loss, made smaller, or kept as it is."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from paceline.data.index.colors import in_colors
from paceline.data.index.image_header import PILLOW_FORMATS
from paceline.data.index.table import Flag
from paceline.data.pack import tiles
from paceline.errors import DataError

_ORIENTATION = 0x0112
_TILED = _KINDS = Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED
_LONGEST_SIDE = 65_500
"""More pixels a side a JPEG cannot hold."""


@dataclass(frozen=True)
class Smaller:
    """A preset that loses detail: the longest side in pixels, and the quality of the JPEG (1 to 100, 4:2:0)."""

    max_side: int | None = 500
    quality: int = 90


@dataclass(frozen=True)
class Job:
    """A picture where it lies, with what the index knows of it."""

    path: str
    offset: int
    length: int
    width: int
    height: int
    flags: int
    smaller: Smaller | None = None
    keep: bool = False
    """Whether it goes into the pack as it is, whatever it may be."""


@dataclass(frozen=True)
class Picture:
    """What goes into the pack."""

    encoded: bytes
    width: int
    height: int
    flags: int


def prepare(job: Job) -> Picture:
    """Read a picture and make of it what a pack holds; a damaged JPEG may end the process."""
    encoded = read_bytes(Path(job.path), job.offset, job.length)
    flags = Flag(job.flags)
    kept = Picture(encoded, job.width, job.height, job.flags)
    if job.keep or Flag.UNREADABLE in flags:
        return kept
    made = _smaller(encoded, job.smaller) if job.smaller else None
    resized = made is not None and (made.width, made.height) != (job.width, job.height)
    if made is not None and (resized or len(made.encoded) < len(encoded)):
        return Picture(made.encoded, made.width, made.height, int(_TILED | (flags & ~_KINDS)))
    if Flag.JPEG not in flags or Flag.TILED in flags:
        return kept
    tiled = tiles.retile(encoded, keep_exif=Flag.TURNED in flags)
    return kept if tiled is None else Picture(tiled, job.width, job.height, int(flags | _TILED))


def read_bytes(path: Path, offset: int, length: int) -> bytes:
    """Bytes of a file; a DataError names the file that does not have them."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            parts, missing = [], length
            while missing and (part := file.read(missing)):
                parts.append(part)
                missing -= len(part)
    except OSError as fault:
        raise DataError(f"{path}: cannot be read: {fault.strerror or fault}") from None
    if missing:
        raise DataError(f"{path}: it ends before byte {offset + length:,}; it has changed since it was indexed")
    return b"".join(parts)


def _smaller(encoded: bytes, preset: Smaller) -> Picture | None:
    """The picture with fewer pixels and bytes, in tiles; None where Pillow cannot decode it, or JPEG not hold it."""
    from PIL import Image, ImageFile  # noqa: PLC0415 - lossless packs do without Pillow

    ImageFile.MAXBLOCK = 1 << 24  # Pillow must write an optimized JPEG in one go
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=PILLOW_FORMATS) as opened:
                # A TIFF is turned by Pillow itself.
                orientation = 1 if opened.format == "TIFF" else opened.getexif().get(_ORIENTATION, 1)
                image = opened.copy() if opened.mode in {"RGB", "L"} else in_colors(opened)
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
        exif[_ORIENTATION] = orientation
    out = io.BytesIO()
    image.save(
        out, "JPEG", quality=preset.quality, optimize=True, subsampling="4:2:0", exif=exif,
        restart_marker_blocks=tiles.tile_interval(-(-image.width // unit), unit),
    )  # fmt: skip
    return Picture(tiles.with_lengths(out.getvalue()), image.width, image.height, int(_TILED))
