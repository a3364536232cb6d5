"""Where what is made once is kept: indexes in files, beside the data or in a cache, and memory for other processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.formats import part_of

_MAGIC = b"paceline"
_ALIGNED = 64
_PART = ".part"
HALF_WRITTEN = f"*{_PART}"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Stored:
    """What was written: a few facts, and arrays that are read from disk only where they are looked at."""

    facts: dict[str, Any]
    arrays: Arrays


def cache_folder() -> Path:
    """Where Paceline keeps what it can make again: PACELINE_CACHE, else the user's cache folder."""
    if named := os.environ.get("PACELINE_CACHE"):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def places(folder: Path) -> tuple[Path, ...]:
    """Where what is known of a data folder may be kept: beside the data, else in the user's cache, else for a while."""
    passing = _temporary_place(folder)
    return (*_lasting_places(folder), *([passing] if _is_own(passing) else []))


def lasting_place(folder: Path) -> Path | None:
    """The first place that can be written and is meant for large files that stay, made if need be."""
    for place in _lasting_places(folder):
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK | os.X_OK):
                return place
    return None


def writable_place(folder: Path) -> Path | None:
    """The first of the places that can be written, made if need be."""
    if (place := lasting_place(folder)) is not None:
        return place
    place = _temporary_place(folder)
    with suppress(OSError):
        place.mkdir(0o700, exist_ok=True)
    return place if _is_own(place) else None


def _lasting_places(folder: Path) -> tuple[Path, ...]:
    cache = cache_folder() / "index" / _name(folder)
    with os.scandir(folder) as children:
        visible = [child.name for child in children if child.is_dir() and not child.name.startswith(".")]
    # Other programs take every folder beside class folders for a class.
    holds_classes = visible and all(part_of(name) == "all" for name in visible)
    return (cache,) if holds_classes else (folder / ".paceline", cache)


def _temporary_place(folder: Path) -> Path:
    """Where all processes of this user find the index that one of them has made, if nothing else can be written."""
    try:
        return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{_name(folder)}"
    except OSError:  # nothing at all can be written
        return Path(os.devnull)


def _is_own(place: Path) -> bool:
    """Whether a folder is this user's alone to write: anybody may make folders among temporary ones."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _name(folder: Path) -> str:
    return hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """One process at a time; the others wait here."""
    try:
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # made by somebody else with whom the folder is shared
        descriptor = os.open(place / "lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network disk without locks: each process then scans for itself
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Memory:
    """Bytes that other processes open by their path: zeros at first, which take no room until they are written to."""

    def __init__(self, size: int, path: str | None = None) -> None:
        self.size, named = size, None
        if path is not None:
            self.file, self.path = os.open(path, os.O_RDWR | os.O_CLOEXEC), path
        elif hasattr(os, "memfd_create"):  # not /dev/shm, which containers keep small
            self.file = os.memfd_create("paceline")
            self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            named = tempfile.NamedTemporaryFile(prefix="paceline-")  # noqa: SIM115 - gone when this is
            self.file, self.path = named.fileno(), named.name
        self.close = finalize(self, named.close if named is not None else partial(os.close, self.file))
        if path is None:
            os.ftruncate(self.file, size)
        self.mapped = mmap.mmap(self.file, size)


def write(path: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    """Write whole or not at all."""
    solid = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    layout, place = {}, 0
    for name, array in solid.items():
        layout[name] = [array.dtype.descr if array.dtype.names else array.dtype.str, list(array.shape), place]
        place += -(-array.nbytes // _ALIGNED) * _ALIGNED
    head = json.dumps({"facts": facts, "arrays": layout, "bytes": place}).encode()
    start = -(-(len(_MAGIC) + 8 + len(head)) // _ALIGNED) * _ALIGNED
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PART, delete=False) as part:
        try:
            part.write((_MAGIC + len(head).to_bytes(8, "little") + head).ljust(start, b"\0"))
            for array in solid.values():
                part.write(array.reshape(-1).view(np.uint8).data if array.nbytes else b"")
                part.write(bytes(-array.nbytes % _ALIGNED))
            part.flush()  # not synchronized: after a power cut the file is short, and then not read
            Path(part.name).chmod(0o644)
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def read(path: Path) -> Stored | None:
    """What was written there; None where nothing is, or something else."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    length = int.from_bytes(mapped[8:16], "little")
    if mapped[:8] != _MAGIC or length > len(mapped) - 16:
        return None
    try:
        head = json.loads(mapped[16 : 16 + length])
        start = -(-(16 + length) // _ALIGNED) * _ALIGNED
        if start + head["bytes"] != len(mapped):
            return None
        return Stored(head["facts"], {name: _array(mapped, start, *where) for name, where in head["arrays"].items()})
    except (ValueError, KeyError, TypeError):
        return None


def _array(mapped: mmap.mmap, start: int, described: Any, shape: list[int], place: int) -> NDArray[Any]:
    names = [tuple(column) for column in described] if isinstance(described, list) else described
    kind: np.dtype[Any] = np.dtype(names)
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(mapped, kind, count, start + place).reshape(shape)


def drop(place: Path, pattern: str) -> None:
    """Remove what is no longer of use, such as what a killed process left; only while the place is locked."""
    for left in place.glob(pattern):
        with suppress(OSError):
            left.unlink()
