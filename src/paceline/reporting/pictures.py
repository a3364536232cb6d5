"""Small pictures inside a page: validation images by the names that a validation's tables give them."""

from __future__ import annotations

import base64
import io
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.data.index.image_header import open_image, to_rgb
from paceline.data.index.scan import open_index
from paceline.data.index.table import Table
from paceline.data.load.arrays import Split, open_split
from paceline.errors import UserError
from paceline.files import read_exactly, read_whole
from paceline.reporting.shown_run import ShownRun
from paceline.settings.data import Files, Made

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

PICTURE_SIDE = 112
"""Pixels of the longer side of a picture."""
_MOST_BYTES = 64 << 20
_PIXEL_ART = 64
"""Up to so many pixels a side, a picture is kept as it is, without loss."""


def picture(image: PILImage, side: int = PICTURE_SIDE) -> str:
    """An image as the address of a picture that holds it."""
    kept = max(image.size) <= _PIXEL_ART
    if not kept:
        image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG" if kept else "JPEG", quality=82)
    return f"data:image/{'png' if kept else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _is_text(name: str) -> bool:
    """Whether a name can be written to a file: bytes that are not UTF-8 come as halves of characters."""
    return name == name.encode(errors="replace").decode()


class ValidationPictures:
    """The validation images of a run, where they are still there."""

    def __init__(self, run: ShownRun) -> None:
        self._run, self._folder = run, run.data_folder

    def of(self, name: str) -> str | None:
        """The picture of an image; None where it cannot be had."""
        try:
            return self._picture(name)
        except Exception:  # noqa: BLE001 - a damaged file makes Pillow's many readers raise anything
            return None

    def key(self, name: str) -> str | None:
        """What a file of labels calls an image; None for data whose labels are not its to change."""
        if not isinstance(self._run.data, Files) or "\n" in name or not _is_text(name):
            return None  # a file of labels is lines of UTF-8
        if " at byte " not in name:
            return name
        try:
            return self._table.keys[self._numbers[name]]
        except (UserError, OSError, KeyError):
            return None

    def _picture(self, name: str) -> str | None:
        from PIL import Image  # noqa: PLC0415 - reports without pictures do without it

        if isinstance(self._run.data, Made):
            return None  # noise has nothing to show
        if not isinstance(self._run.data, Files):
            return picture(Image.fromarray(self._split.images[int(name)].squeeze()))
        assert self._folder is not None
        path, at, _ = name.rpartition(" at byte ")
        content = self._bytes_of(name) if at and path else read_whole(self._folder / name, _MOST_BYTES)
        with open_image(content) as image:
            image.draft("RGB", (PICTURE_SIDE, PICTURE_SIDE))
            return picture(to_rgb(image))

    def _bytes_of(self, name: str) -> bytes:
        """The bytes of an image among others in one file."""
        assert self._folder is not None
        path, offset, length = self._table.span(self._numbers[name])
        return read_exactly(self._folder / path, offset, length)

    @cached_property
    def _split(self) -> Split:
        return open_split(self._run.stored.recipe, self._folder, "validation")

    @cached_property
    def _table(self) -> Table:
        assert isinstance(self._run.data, Files)
        assert self._folder is not None
        return open_index(self._run.data, self._folder).validation

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {self._table.name(index): index for index in range(len(self._table))}
