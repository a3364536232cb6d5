"""Images in files, by number: their encoded bytes, and what becomes of those that cannot be decoded."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.index.scan import open_index
from paceline.data.index.table import Table
from paceline.data.shared_memory import Memory
from paceline.errors import Broken, DataError, ReadFailed
from paceline.planning import Plan
from paceline.settings.data import Files

Numbers = NDArray[np.int64]

QUARANTINE = "quarantine.jsonl"
PAUSES = (0.1, 0.3, 1.0, 3.0, 9.0)
"""Seconds between attempts to read."""


_ENTRY = np.dtype([("place", "<u8"), ("length", "<u8")])
"""Where an image's bytes are, from when one process begins to write them; and how many, from when they are there."""
_HEAD = 64
"""Bytes in front of the entries; the first eight count the bytes of images that are taken."""


class Cache:
    """Encoded images of both splits that stay in memory once they are read, up to so many bytes, for all processes."""

    def __init__(self, size: int, counts: tuple[int, int] = (0, 0), path: str | None = None) -> None:
        self._given = size, counts
        self._firsts = {"training": 0, "validation": counts[0]}
        self._start = _HEAD + _ENTRY.itemsize * sum(counts)
        self._memory = Memory(self._start + size, path) if size else None
        if self._memory is not None:
            self._taken = np.frombuffer(self._memory.mapped, "<u8", 1)
            self._entries = np.frombuffer(self._memory.mapped, _ENTRY, sum(counts), _HEAD)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[int, tuple[int, int], str | None]]:
        """Another process opens the same memory."""
        return Cache, (*self._given, self._memory.path if self._memory is not None else None)

    def take(self, split: str, number: int) -> bytes | None:
        """The bytes of an image, if they are here."""
        if self._memory is None:
            return None
        with self._alone(self._memory):
            place, length = self._entries[self._firsts[split] + number].item()
        return self._memory.mapped[place : place + length] if length else None

    def keep(self, split: str, number: int, found: bytes) -> bytes:
        """The same bytes, kept where there is room."""
        if self._memory is None or not found:
            return found
        entry = self._firsts[split] + number
        with self._alone(self._memory):
            place = self._start + int(self._taken[0])
            if self._entries["place"][entry] or len(found) > self._memory.size - place:
                return found
            self._entries["place"][entry] = place
            self._taken[0] += len(found)
        self._memory.mapped[place : place + len(found)] = found
        with self._alone(self._memory):  # whoever then sees the length sees the bytes too
            self._entries["length"][entry] = len(found)
        return found

    @contextmanager
    def _alone(self, memory: Memory) -> Iterator[None]:
        """No other thread or process looks at the entries or changes them; one that is killed lets go."""
        with self._lock:  # the lock of a file is one for all threads of a process
            fcntl.flock(memory.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(memory.file, fcntl.LOCK_UN)


class Encoded:
    """A split whose images are byte ranges of files."""

    def __init__(self, table: Table, folder: Path, split: str, cache: Cache | None = None) -> None:
        self.table, self.split, self.count = table, split, len(table.rows)
        self.folder, self.cache = folder, cache or Cache(0)
        self._failed = threading.Event()

    def labels_of(self, numbers: Numbers) -> Numbers:
        """The labels of images."""
        return self.table.rows["label"][numbers].astype(np.int64)

    def read(self, number: int) -> bytes:
        """An image's bytes; a read that fails is tried again, and in the end ends the run."""
        kept = self.cache.take(self.split, number)
        if kept is not None:
            return kept
        attempts = 0
        while True:
            try:
                return self.cache.keep(self.split, number, self._read(number))
            except OSError as fault:
                attempts += 1
                # Once one image has used up its attempts, those ahead of it need not wait for theirs.
                if attempts <= len(PAUSES) and not self._failed.wait(PAUSES[attempts - 1]):
                    continue
                self._failed.set()
                raise ReadFailed(
                    f"{self.table.name(number)}: cannot be read ({fault.strerror or fault}; {attempts} attempts); "
                    "go on with paceline resume when it can"
                ) from None

    def _read(self, number: int) -> bytes:
        row = self.table.rows[number]
        offset, length = int(row["offset"]), int(row["length"])
        file = os.open(self.folder / self.table.shards[int(row["shard"])], os.O_RDONLY)
        try:
            longer = offset == 0 and os.fstat(file).st_size > length  # a file of its own that was overwritten
            found = os.pread(file, length, offset)
            while 0 < len(found) < length:  # a network file system may give less than was asked for
                more = os.pread(file, length - len(found), offset + len(found))
                if not more:
                    break
                found += more
        finally:
            os.close(file)
        if len(found) < length or longer:
            raise DataError(
                f"{self.table.name(number)}: has changed since it was indexed, with {length:,} bytes then; touch its "
                "folder, and it is indexed again"
            )
        return found

    def after(self, number: int) -> Iterator[int]:
        """The images that follow one, around the end, each once: where a replacement is looked for."""
        for step in range(1, self.count):
            yield (number + step) % self.count


def open_splits(plan: Plan, data: Files, folder: Path) -> tuple[Encoded, Encoded]:
    """What is trained on and what is judged."""
    found = open_index(data, folder)
    cache = Cache(plan.placement.cache, (len(found.training), len(found.validation)))
    return Encoded(found.training, folder, "training", cache), Encoded(found.validation, folder, "validation", cache)


@dataclass
class Quarantine:
    """Images that cannot be decoded: counted once each, listed in the run folder, and too many end the run."""

    folder: Path | None
    """Where they are listed; None only counts."""
    most: int
    _known: set[tuple[str, int]] = field(default_factory=set)
    _earlier: set[tuple[str, int]] = field(default_factory=set)
    """Those that were listed before this one was made, until they are looked at again."""
    _mended: set[tuple[str, int]] = field(default_factory=set)
    """Those that are listed and can be decoded by now."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, folder: Path | None, most: int) -> Quarantine:
        """One that allows so many images, with those that the folder lists already."""
        made = cls(folder, most)
        made._end_the_last_line()
        made._earlier = made._listed()
        made._known.update(made._earlier)
        return made

    def add(self, split: Encoded, number: int, reason: str, is_bad: Callable[[str, int], bool] | None = None) -> None:
        """List an image; before too many end the run, `is_bad` looks again at those of earlier starts."""
        image = split.split, number
        with self._lock:
            new = image not in self._known
            self._known.add(image)
            self._mended.discard(image)
            if new and self.folder is not None:
                row = split.table.rows[number]
                line = {
                    "split": split.split,
                    "image": number,
                    "name": split.table.name(number),
                    "path": split.table.shards[int(row["shard"])],
                    "offset": int(row["offset"]),
                    "reason": reason,
                }
                self._write(json.dumps(line))
                self._known.update(self._listed() - self._mended)
            if len(self._known) > self.most and is_bad is not None:
                self._mended |= {one for one in self._earlier - {image} if not is_bad(*one)}
                self._known -= self._mended
                self._earlier.clear()
            if len(self._known) > self.most:
                where = f"; they are listed in {self.folder / QUARANTINE}" if self.folder else ""
                raise DataError(
                    f"{split.table.name(number)}: {reason}; with it {len(self._known):,} images cannot be decoded, and "
                    f"data.max_bad allows {self.most:,}{where}; mend them, or write a larger data.max_bad"
                )

    def __len__(self) -> int:
        return len(self._known)

    def _end_the_last_line(self) -> None:
        """A kill may have cut it short, and the next image would be written behind it."""
        path = self.folder / QUARANTINE if self.folder is not None else None
        if path is not None and path.is_file() and not path.read_bytes().endswith(b"\n"):
            self._write("")

    def _write(self, line: str) -> None:
        assert self.folder is not None
        path = self.folder / QUARANTINE
        try:
            with path.open("a") as file:  # one short write each: replicas share the file
                file.write(line + "\n")
        except OSError as fault:
            raise Broken(f"{path}: cannot be written: {fault.strerror}; what was saved is whole") from None

    def _listed(self) -> set[tuple[str, int]]:
        return {(str(row["split"]), int(row["image"])) for row in listed(self.folder)} if self.folder else set()


def listed(folder: Path) -> list[dict[str, str | int]]:
    """The images that a run has listed as bad, each once; a line that a kill cut short is passed over."""
    path = folder / QUARANTINE
    rows: dict[tuple[object, object], dict[str, str | int]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            rows.setdefault((row["split"], row["image"]), row)
        except (ValueError, KeyError):
            continue
    return list(rows.values())
