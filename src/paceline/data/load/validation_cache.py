"""Validation pictures that stay decoded on disk, so that every later validation, of any run, only copies them."""

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
from paceline.data.load.image_files import Encoded
from paceline.settings.data import Files

Pictures = NDArray[np.uint8]

_MARK = np.dtype([("kept", "<u4"), ("check", "<u4")])
"""Whether a picture is kept, and a checksum of its pixels."""
_SETS = 2
"""How many sets of pictures stay beside one data set's index: those of the newest settings, and those before them."""


class Decoded:
    """One picture for each validation image, by number, in a memory-mapped file."""

    def __init__(self, place: Path, name: str, count: int, side: int) -> None:
        path = place / f"{name}.pictures"
        self._pictures = _mapped(path, np.dtype(np.uint8), (count, side, side, 3))
        self._marks = _mapped(place / f"{name}.marks", _MARK, (count,))
        # Whoever removes old ones can tell that these are in use, on another host too.
        used = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, used)
        with suppress(OSError):  # a network disk without locks: nothing is ever removed there
            fcntl.flock(used, fcntl.LOCK_SH)
        os.utime(path)

    def take(self, number: int, into: Pictures) -> bool:
        """Copy a picture, if it is kept."""
        mark = self._marks[number]
        if not mark["kept"]:
            return False
        into[:] = self._pictures[number]
        # A machine that went down may have written the mark and not the picture.
        return bool(zlib.crc32(np.ascontiguousarray(into).data) == mark["check"])

    def keep(self, number: int, picture: Pictures) -> None:
        """Keep a picture for the next time."""
        self._pictures[number] = picture
        self._marks[number] = (1, zlib.crc32(np.ascontiguousarray(picture).data))


def open_decoded(data: Files, split: Encoded, side: int, decoder: str) -> Decoded | None:
    """The pictures of a validation set as these settings make them; None where they cannot be kept anywhere."""
    place = file.lasting_folder(split.folder)
    if place is None:
        return None
    rows = hashlib.blake2b(np.ascontiguousarray(split.table.rows).tobytes(), digest_size=8).hexdigest()
    made_by = {**data.model_dump(include={"resize", "evaluation", "orientation"}), "side": side, "decoder": decoder}
    text = json.dumps([rows, _stamps(split), made_by], sort_keys=True)
    name = f"validation-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    with suppress(OSError), file.locked(place):  # another user's, with whom the data are shared
        _remove_old(place, name)
        if _has_room(place, name, split.count * (3 * side * side + _MARK.itemsize)):
            return Decoded(place, name, split.count, side)
    return None


def _remove_old(place: Path, name: str) -> None:
    """Remove what other settings have kept, but for the last few and for what a run has open."""
    others = [path for path in place.glob("validation-*.pictures") if path.stem != name]
    for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(others) + 1 - _SETS)]:
        with suppress(OSError), path.open("r+b") as file:  # in use, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_suffix(".marks").unlink(missing_ok=True)
            path.unlink()


def _stamps(split: Encoded) -> list[list[str | int]]:
    """When the files last changed: other pictures may well have rows like these. As in the index, a folder's time
    stands for the images in it that are files of their own."""
    alone = not split.table.rows["offset"].any()
    names = {str(PurePosixPath(name).parent) if alone else name for name in split.table.shards}
    found: list[list[str | int]] = []
    for name in sorted(names):
        with suppress(OSError):  # a file that is gone is told where it is read
            found.append([os.fsencode(name).hex(), (split.folder / name).stat().st_mtime_ns])
    return found


def _has_room(place: Path, name: str, size: int) -> bool:
    """Whether the disk can take everything: it would end the process to find no room behind a memory map."""
    there = sum(path.stat().st_blocks * 512 for path in place.glob(f"{name}.*"))
    return shutil.disk_usage(place).free + there >= size


def _mapped(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """A file of this shape, of zeros where it is new, which takes no room on disk until it is written to."""
    size = dtype.itemsize * int(np.prod(shape))
    with path.open("ab") as file:
        if file.tell() != size:
            file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)
