"""Memory that several processes share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.data.shared_memory import Memory


def test_another_process_sees_what_one_writes() -> None:
    one = Memory(4096)
    other = Memory(4096, one.handle)
    one.mapped[7:10] = b"abc"
    assert other.mapped[6:11] == b"\0abc\0"


def test_a_file_that_took_the_place_of_a_closed_memory_is_never_written_to(tmp_path: Path) -> None:
    memory = Memory(4096)
    handle, descriptor = memory.handle, memory.file
    memory.close()
    path = tmp_path / "photo.jpg"
    path.write_bytes(bytes(4096))
    taken = os.open(path, os.O_RDONLY)
    try:
        if taken != descriptor:
            os.dup2(taken, descriptor)
        with pytest.raises(FileNotFoundError, match="is no longer the memory that it was"):
            Memory(4096, handle)
    finally:
        for opened in {taken, descriptor}:
            os.close(opened)
