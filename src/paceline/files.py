"""Files that are written whole or not at all, lines that are appended, and byte ranges that are read whole."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import DataError, UserError

UNFINISHED = "*.part"
"""Matches the temporary files that a killed process leaves behind."""
_HEAD = 1024
"""Bytes at the beginning of a file by which it is known again."""


@contextmanager
def new_file(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Write a file under a temporary name in the same folder, and rename it into place once the block succeeds.

    With `sync`, the content is on disk before the rename, so that not even a power cut leaves half a file.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def disk_faults(kind: type[UserError], path: Path, what: str, more: str = "") -> Iterator[None]:
    """Turn what the disk refuses inside into a fault such as 'PATH: cannot be read: Permission denied; MORE'."""
    try:
        yield
    except OSError as fault:
        raise kind(f"{path}: {what}: {fault.strerror or fault}{f'; {more}' if more else ''}") from None


def write_whole(path: Path, content: bytes | str, sync: bool = False) -> None:
    """Replace the content of a file such that a reader, or a kill, never sees half of it."""
    with new_file(path, sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_writing(path: Path) -> None:
    """Raise the OSError that writing a file would, without writing it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def open_file(path: Path) -> IO[bytes]:
    """A file to read; an OSError where it is none, such as a pipe, which would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is not a file")
    return open(descriptor, "rb")  # noqa: PTH123 - of a descriptor


def read_whole(path: Path, most: int | None = None) -> bytes:
    """The content of a file; an OSError where it is none, or has more than `most` bytes."""
    with open_file(path) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB")
    return content


def append_line(path: Path, line: str) -> None:
    """Append a line, in one short write, as processes may share the file; half a line that a kill left is ended."""
    start = "\n" if is_torn(path) else ""
    # A pipe in its place would be waited for.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    with open(descriptor, "a") as file:  # noqa: PTH123 - of a descriptor
        file.write(f"{start}{line}\n")


class Appender:
    """Appends lines to a file; what the disk does not take waits in memory, and goes before what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[str] = deque()

    def append(self, line: str) -> None:
        """Append what waits and this line; where the disk refuses it, an OSError says so and the rest waits."""
        self.waiting.append(line)
        while self.waiting:
            append_line(self.path, self.waiting[0])
            self.waiting.popleft()


def open_lock(path: Path) -> IO[str]:
    """A file to lock, made if need be; a pipe in its place would be waited for."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    return open(descriptor, "w")  # noqa: PTH123 - of a descriptor


def is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    if not os.path.isfile(path):  # noqa: PTH113
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def cut_torn_line(path: Path) -> None:
    """Cut off half a line that a kill left at the end of a file of rows."""
    if not path.is_symlink() and is_torn(path):
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file, if there is one; a line that a kill left unfinished is passed over."""
    if path.is_char_device():  # such as /dev/null, where lines are only written to
        return []
    try:
        text = read_whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return rows_in(text)


def rows_in(text: str | bytes) -> list[dict[str, Any]]:
    """The JSON objects in lines; a line that holds none is passed over."""
    rows = []
    for line in (text if isinstance(text, str) else text.decode(errors="replace")).splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows


class Tail:
    """Reads the JSON objects in the lines of a file that grows, each once.

    Half a line at the end waits for its other half, or until the next writer cuts it off. A file that is replaced is
    read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._head = 0, b""
        self._seen: tuple[int, int, int, int] | None = None
        self.changed_at = 0.0
        """When the file was last written to, in seconds since 1970."""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The rows that are new, and whether all earlier ones have gone with the file that they were in."""
        try:
            about = os.stat(self._path)  # noqa: PTH116 - the cheapest look, which is nearly always enough
        except (FileNotFoundError, NotADirectoryError):
            return [], self._forget()
        seen = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        if seen == self._seen:
            return [], False
        with open_file(self._path) as file:
            same = file.read(len(self._head)) == self._head and about.st_size >= self._offset
            replaced = not same and self._forget()
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(lines) + len(newline)
            if len(self._head) < _HEAD:
                file.seek(0)
                self._head = file.read(min(_HEAD, self._offset))
        self._seen, self.changed_at = seen, about.st_mtime
        return rows_in(lines), replaced

    def _forget(self) -> bool:
        """Begin anew; gives whether anything had been read."""
        before, self._offset, self._head, self._seen = self._offset, 0, b"", None
        return before > 0


def read_exactly(path: Path, offset: int, count: int) -> bytes:
    """Read a byte range of a file that was indexed; DataError where the file is too short by now."""
    content = b""
    with path.open("rb", buffering=0) as file:
        # A network file system may return less than was asked for.
        while len(content) < count and (chunk := os.pread(file.fileno(), count - len(content), offset + len(content))):
            content = content + chunk if content else chunk
    if len(content) < count:
        raise DataError(
            f"{path}: ends before byte {offset + count:,}, so it has changed since it was indexed; touch its folder "
            "to have it indexed again"
        )
    return content
