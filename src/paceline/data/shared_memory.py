"""Memory that several processes share."""

from __future__ import annotations

import mmap
import os
import tempfile
from functools import partial
from weakref import finalize


class Memory:
    """Bytes that other processes open by path: zeros at first, which take no room until they are written to."""

    def __init__(self, size: int, path: str | None = None) -> None:
        self.size, temporary = size, None
        if path is not None:
            self.file, self.path = os.open(path, os.O_RDWR | os.O_CLOEXEC), path
        elif hasattr(os, "memfd_create"):  # not /dev/shm, which containers keep small
            self.file = os.memfd_create("paceline")
            self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            temporary = tempfile.NamedTemporaryFile(prefix="paceline-")  # noqa: SIM115 - gone when this object is
            self.file, self.path = temporary.fileno(), temporary.name
        self.close = finalize(self, temporary.close if temporary is not None else partial(os.close, self.file))
        if path is None:
            os.ftruncate(self.file, size)
        self.mapped = mmap.mmap(self.file, size)
