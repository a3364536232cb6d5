"""Index files: arrays in the safetensors format, mapped into memory, and the folders that they are kept in."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from paceline.data.index.formats import split_of
from paceline.files import open_file, write_whole

Arrays = Mapping[str, NDArray[Any]]

_DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I64": "<i8", "F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True)
class ArrayFile:
    """The content of an index file: a JSON header, and arrays that are read from disk only where they are used."""

    header: dict[str, Any]
    arrays: Arrays


_UNSET, _UNSET_ARRAYS = "0" * 64, "1" * 64
"""Stand where the checksums of the header and of the arrays go while they are computed."""


def write_arrays(path: Path, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a header and arrays as a safetensors file with checksums; structured arrays go in as bytes."""
    # Not synchronized: after a power cut the checksums are wrong, and then read_arrays does not accept the file.
    structured = {name: array.dtype.descr for name, array in arrays.items() if array.dtype.names}
    plain = {name: _as_bytes(array) if name in structured else array for name, array in arrays.items()}
    tensors = {name: np.ascontiguousarray(array) for name, array in plain.items()}
    # One text: safetensors writes several in an order that changes, and the same index should be the same bytes.
    described = {"sha256": _UNSET, "arrays_sha256": _UNSET_ARRAYS, "header": header, "structured": structured}
    content = save(tensors, {"paceline": json.dumps(described)})
    start = _header_end(content)
    head = content[:start].replace(_UNSET_ARRAYS.encode(), _sha256(memoryview(content)[start:]), 1)
    write_whole(path, head.replace(_UNSET.encode(), _sha256(head), 1) + content[start:])


def _header_end(content: bytes | mmap.mmap) -> int:
    """How many bytes of a safetensors file come before its arrays."""
    return 8 + int.from_bytes(content[:8], "little")


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(len(array), array.dtype.itemsize)


def read_arrays(
    path: Path, check_arrays: bool = True, damaged: Callable[[Path], None] = lambda _: None
) -> ArrayFile | None:
    """Map what write_arrays wrote; None where there is no such file, or a damaged one, which is then reported.

    With `check_arrays` off, only the header is certain to be what was written.
    """
    try:
        with open_file(path) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    content = _parse(mapped, check_arrays)
    if content is None:
        damaged(path)
    return content


def _parse(mapped: mmap.mmap, check_arrays: bool) -> ArrayFile | None:
    start = _header_end(mapped)
    if start > len(mapped):
        return None
    try:
        tensors = json.loads(mapped[8:start])
        metadata = json.loads(tensors.pop("__metadata__")["paceline"])
        structured = metadata["structured"]
        checksum = metadata["sha256"].encode()
        if checksum != _sha256(mapped[:start].replace(checksum, _UNSET.encode(), 1)):
            return None
        if check_arrays and metadata["arrays_sha256"].encode() != _sha256(memoryview(mapped)[start:]):
            return None
        if start + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0) != len(mapped):
            return None
        arrays = {name: _array(mapped, start, tensor, structured.get(name)) for name, tensor in tensors.items()}
        return ArrayFile(metadata["header"], arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _array(mapped: mmap.mmap, start: int, tensor: dict[str, Any], columns: list[list[str]] | None) -> NDArray[Any]:
    dtype: np.dtype[Any] = np.dtype(_DTYPES[tensor["dtype"]] if columns is None else [tuple(pair) for pair in columns])
    shape = tensor["shape"] if columns is None else tensor["shape"][:1]
    first, last = tensor["data_offsets"]
    if first == last:
        return np.zeros(shape, dtype)
    return np.frombuffer(mapped, dtype, (last - first) // dtype.itemsize, start + first).reshape(shape)


def cache_folder() -> Path:
    """Where Paceline keeps what it can make again: PACELINE_CACHE, else the user's cache folder."""
    if folder := os.environ.get("PACELINE_CACHE"):
        return Path(folder)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def index_folders(data_folder: Path) -> tuple[Path, ...]:
    """Folders that may hold the index of a data set: beside the data, in the user's cache, or a temporary one."""
    temporary = _temporary_folder(data_folder)
    return (*_lasting_folders(data_folder), *([temporary] if _is_private(temporary) else []))


def lasting_folder(data_folder: Path) -> Path | None:
    """The first folder that can be written and is meant for large files that stay; created if need be."""
    for folder in _lasting_folders(data_folder):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def writable_folder(data_folder: Path) -> Path | None:
    """The first index folder that can be written, created if need be."""
    if (folder := lasting_folder(data_folder)) is not None:
        return folder
    folder = _temporary_folder(data_folder)
    with suppress(OSError):
        folder.mkdir(0o700, exist_ok=True)
    return folder if _is_private(folder) else None


def _lasting_folders(data_folder: Path) -> tuple[Path, ...]:
    cache = cache_folder() / "index" / _name(data_folder)
    with os.scandir(data_folder) as children:
        visible = [child.name for child in children if child.is_dir() and not child.name.startswith(".")]
    # Other programs take every folder beside class folders for a class.
    holds_classes = visible and all(split_of(name) == "all" for name in visible)
    return (cache,) if holds_classes else (data_folder / ".paceline", cache)


def _temporary_folder(data_folder: Path) -> Path:
    """Where all processes of this user find the index that one of them made, if nothing else can be written."""
    try:
        return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{_name(data_folder)}"
    except OSError:  # nothing at all can be written
        return Path(os.devnull)


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to a folder: anybody may create folders among the temporary ones."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _name(data_folder: Path) -> str:
    return hashlib.blake2b(os.fsencode(data_folder.resolve()), digest_size=8).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one process at a time; the others wait here."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # created by somebody else with whom the folder is shared
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network disk without locks: each process then scans for itself
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_files(folder: Path, pattern: str) -> None:
    """Remove files that are no longer of use, such as those of a killed process; only while the folder is locked."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            path.unlink()
