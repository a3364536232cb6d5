"""Pictures on their way into a pack, prepared by processes that may die of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from paceline.data.index.table import Flag
from paceline.data.pack.pool import ordered_pool
from paceline.data.pack.transcode import LossyPreset, SourceImage, transcode
from paceline.errors import Broken, DataError


def save(path: Path, number: int, quality: int = 75) -> None:
    coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse.repeat(8, 0).repeat(8, 1)).save(path, quality=quality)


def pixels(encoded: bytes) -> bytes:
    return bytes(simplejpeg.decode_jpeg(encoded, strict=True).data)


def test_a_picture_that_a_lower_quality_would_not_make_smaller_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path / "x.jpg", 1, quality=30)
    encoded = (tmp_path / "x.jpg").read_bytes()
    job = SourceImage(
        str(tmp_path / "x.jpg"), 0, len(encoded), 128, 96, int(Flag.JPEG | Flag.SEQUENTIAL), LossyPreset(500, 95)
    )
    assert pixels(transcode(job).encoded) == pixels(encoded)


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    save(tmp_path / "x.jpg", 1)
    with pytest.raises(DataError, match=r"x.jpg: ends before byte 1,000,000"):
        next(ordered_pool([SourceImage(str(tmp_path / "x.jpg"), 0, 1_000_000, 128, 96, 3)], 1))


class Deadly(str):
    """A path that ends the process which first hears of it."""

    status: int

    def __new__(cls, path: Path, status: int) -> Deadly:
        made = super().__new__(cls, path)
        made.status = status
        return made

    def __reduce__(self) -> Any:
        status, self.status = self.status, 0
        return (os._exit, (status,)) if status else (str, (str(self),))


def test_a_picture_that_ends_its_worker_is_kept_as_it_is(tmp_path: Path) -> None:
    jobs = []
    for number in range(40):
        save(tmp_path / f"{number}.jpg", number)
        path = tmp_path / f"{number}.jpg"
        place = Deadly(path, 70) if number in {2, 39} else str(path)
        jobs.append(SourceImage(place, 0, path.stat().st_size, 128, 96, int(Flag.JPEG | Flag.SEQUENTIAL)))
    found = list(ordered_pool(jobs, 2))
    assert [bool(picture.flags & Flag.TILED) for picture in found] == [number not in {2, 39} for number in range(40)]
    assert [pixels(picture.encoded) for picture in found] == [pixels(Path(job.path).read_bytes()) for job in jobs]


def test_a_worker_that_ends_for_another_reason_ends_the_packing(tmp_path: Path) -> None:
    save(tmp_path / "x.jpg", 1)
    with pytest.raises(Broken, match=r"x.jpg: a worker process ended with status 9"):
        list(ordered_pool([SourceImage(Deadly(tmp_path / "x.jpg", 9), 0, 100, 128, 96, 3)], 1))
