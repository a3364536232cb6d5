"""A cache of encoded images in memory that all processes of a host share."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from paceline.data.shared_memory import Handle, Memory

_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u8")])
"""Where an image's bytes are, set before they are written; and how many, set once they are there."""
_HEAD = 64
"""Bytes before the entries; the first eight count the bytes of images in use."""


class Cache:
    """Encoded images of both splits, kept in memory once they are read, up to so many bytes, for all processes."""

    def __init__(self, size: int, counts: tuple[int, int] = (0, 0), handle: Handle | None = None) -> None:
        self._arguments = size, counts
        self._firsts = {"training": 0, "validation": counts[0]}
        self._start = _HEAD + _ENTRY.itemsize * sum(counts)
        self._memory = Memory(self._start + size, handle) if size else None
        if self._memory is not None:
            self._used = np.frombuffer(self._memory.mapped, "<u8", 1)
            self._entries = np.frombuffer(self._memory.mapped, _ENTRY, sum(counts), _HEAD)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[int, tuple[int, int], Handle | None]]:
        """Another process opens the same memory."""
        return Cache, (*self._arguments, self._memory.handle if self._memory is not None else None)

    def get(self, split: str, index: int) -> bytes | None:
        """The bytes of an image, or None where they are not kept."""
        if self._memory is None:
            return None
        with self._locked(self._memory):
            offset, length = self._entries[self._firsts[split] + index].item()
        return self._memory.mapped[offset : offset + length] if length else None

    def put(self, split: str, index: int, encoded: bytes) -> bytes:
        """Keep the bytes of an image where there is room, and return them."""
        if self._memory is None or not encoded:
            return encoded
        entry = self._firsts[split] + index
        with self._locked(self._memory):
            offset = self._start + int(self._used[0])
            if self._entries["offset"][entry] or len(encoded) > self._memory.size - offset:
                return encoded
            self._entries["offset"][entry] = offset
            self._used[0] += len(encoded)
        self._memory.mapped[offset : offset + len(encoded)] = encoded
        with self._locked(self._memory):  # whoever then sees the length sees the bytes too
            self._entries["length"][entry] = len(encoded)
        return encoded

    @contextmanager
    def _locked(self, memory: Memory) -> Iterator[None]:
        """Keep all other threads and processes away from the entries; one that is killed lets go."""
        with self._lock:  # the lock of a file is one for all threads of a process
            fcntl.flock(memory.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(memory.file, fcntl.LOCK_UN)
