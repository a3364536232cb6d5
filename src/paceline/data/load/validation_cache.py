"""Decoded validation images on disk, so that later validations, of any run, only copy them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from paceline.data.index import file
from paceline.data.load.image_files import ImageFiles
from paceline.numpy_types import UInt8s
from paceline.settings.data import Files

_MARK = np.dtype([("stored", "<u4"), ("checksum", "<u4")])
"""Whether an image is stored, and a checksum of its pixels."""
_SETS = 2
"""How many sets of images stay beside one data set's index: those of the last two settings."""


class ValidationCache:
    """The decoded validation images, by index, in a memory-mapped file."""

    def __init__(self, folder: Path, name: str, count: int, side: int) -> None:
        path = folder / f"{name}.pictures"
        self._images = _mapped(path, np.dtype(np.uint8), (count, side, side, 3))
        self._marks = _mapped(folder / f"{name}.marks", _MARK, (count,))
        # Whoever removes old ones can tell that these are in use, on another host too.
        used = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, used)
        with suppress(OSError):  # a network disk without locks: nothing is ever removed there
            fcntl.flock(used, fcntl.LOCK_SH)
        os.utime(path)

    def load(self, index: int, out: UInt8s) -> bool:
        """Copy an image into `out`; false where it is not stored."""
        mark = self._marks[index]
        if not mark["stored"]:
            return False
        out[:] = self._images[index]
        # A machine that went down may have written the mark and not the image.
        return bool(zlib.crc32(np.ascontiguousarray(out).data) == mark["checksum"])

    def store(self, index: int, image: UInt8s) -> None:
        """Store an image for the next time."""
        self._images[index] = image
        self._marks[index] = (1, zlib.crc32(np.ascontiguousarray(image).data))


def open_validation_cache(data: Files, split: ImageFiles, side: int, decoder: str) -> ValidationCache | None:
    """The cache of a validation set decoded with these settings; None where nothing can be written."""
    folder = file.lasting_folder(split.folder)
    if folder is None:
        return None
    rows = hashlib.blake2b(np.ascontiguousarray(split.table.rows).tobytes(), digest_size=8).hexdigest()
    settings = {**data.model_dump(include={"resize", "evaluation", "orientation"}), "side": side, "decoder": decoder}
    text = json.dumps([rows, _stamps(split), settings], sort_keys=True)
    name = f"validation-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    with suppress(OSError), file.locked(folder):  # another user's, with whom the data are shared
        _remove_old(folder, name)
        if _has_room(folder, name, split.count * (3 * side * side + _MARK.itemsize)):
            return ValidationCache(folder, name, split.count, side)
    return None


def _remove_old(folder: Path, name: str) -> None:
    """Remove the images of other settings, except the last few and what a run has open."""
    others = [path for path in folder.glob("validation-*.pictures") if path.stem != name]
    for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(others) + 1 - _SETS)]:
        with suppress(OSError), path.open("r+b") as file:  # in use, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_suffix(".marks").unlink(missing_ok=True)
            path.unlink()


def _stamps(split: ImageFiles) -> list[list[str | int]]:
    """When the files last changed: other images may well have rows like these. As in the index, a folder's time
    stands for the images in it that are files of their own."""
    alone = not split.table.rows["offset"].any()
    names = {str(PurePosixPath(name).parent) if alone else name for name in split.table.shards}
    stamps: list[list[str | int]] = []
    for name in sorted(names):
        with suppress(OSError):  # a missing file is reported where it is read
            stamps.append([os.fsencode(name).hex(), (split.folder / name).stat().st_mtime_ns])
    return stamps


def _has_room(folder: Path, name: str, size: int) -> bool:
    """Whether the disk can take everything: it would end the process to find no room behind a memory map."""
    present = sum(path.stat().st_blocks * 512 for path in folder.glob(f"{name}.*"))
    return shutil.disk_usage(folder).free + present >= size


def _mapped(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """A file of this shape, of zeros where it is new, which takes no room on disk until it is written to."""
    size = dtype.itemsize * int(np.prod(shape))
    with path.open("ab") as file:
        if file.tell() != size:
            file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)
