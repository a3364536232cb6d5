"""What the tests of layouts share: folders of small pictures, and the classes that an index gives them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from paceline.data.index.table import Index, Table


def picture(form: str = "JPEG", color: tuple[int, int, int] = (200, 10, 90), size: tuple[int, int] = (24, 16)) -> bytes:
    """A picture of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, form)
    return buffer.getvalue()


def put(folder: Path, *names: str, content: bytes = picture()) -> Path:
    """Write a picture under each name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def labels(table: Table, index: Index) -> dict[str, str]:
    """The class of each image by its key."""
    return {key: index.classes[label] for key, label in zip(table.keys, table.rows["label"].tolist(), strict=True)}
