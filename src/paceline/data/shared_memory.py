"""Memory that several processes share."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from weakref import finalize


@dataclass(frozen=True)
class Handle:
    """How another process opens a memory."""

    path: str
    file: tuple[int, int]
    """The device and inode of its file: once the memory is closed, the same path may lead to any other file."""


class Memory:
    """Bytes that other processes open by handle: zeros at first, which take no room until they are written to."""

    def __init__(self, size: int, handle: Handle | None = None) -> None:
        self.size, temporary = size, None
        if handle is not None:
            path, self.file = handle.path, os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        elif hasattr(os, "memfd_create"):  # not /dev/shm, which containers keep small
            self.file = os.memfd_create("paceline")
            path = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            temporary = tempfile.NamedTemporaryFile(prefix="paceline-")  # noqa: SIM115 - gone when this object is
            self.file, path = temporary.fileno(), temporary.name
        self.close = finalize(self, temporary.close if temporary is not None else partial(os.close, self.file))
        status = os.fstat(self.file)
        self.handle = Handle(path, (status.st_dev, status.st_ino))
        if handle is None:
            os.ftruncate(self.file, size)
        elif handle != self.handle:
            self.close()
            raise FileNotFoundError(f"{path}: is no longer the memory that it was")
        self.mapped = mmap.mmap(self.file, size)
