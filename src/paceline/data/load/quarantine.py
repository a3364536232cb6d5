"""Images that cannot be decoded: each is listed in the run folder, and too many end the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.load.image_files import ImageFiles
from paceline.errors import DataError
from paceline.files import append_line, read_rows
from paceline.visible import plural

QUARANTINE = "quarantine.jsonl"


@dataclass
class Quarantine:
    """Images that cannot be decoded: counted once each, listed in the run folder, and too many end the run."""

    folder: Path | None
    """Where they are listed; None only counts."""
    most: int
    _bad: set[tuple[str, int]] = field(default_factory=set)
    _earlier: set[tuple[str, int]] = field(default_factory=set)
    """Those that were listed before this one was made, until they are looked at again."""
    _mended: set[tuple[str, int]] = field(default_factory=set)
    """Those that are listed and can be decoded by now."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, folder: Path | None, most: int) -> Quarantine:
        """One that allows so many images, with those that the folder lists already."""
        quarantine = cls(folder, most)
        quarantine._earlier = quarantine._listed()
        quarantine._bad.update(quarantine._earlier)
        return quarantine

    def add(self, split: ImageFiles, index: int, reason: str, is_bad: Callable[[str, int], bool] | None = None) -> None:
        """List an image; before too many end the run, `is_bad` looks again at those of earlier starts."""
        image = split.split, index
        with self._lock:
            new = image not in self._bad
            self._bad.add(image)
            self._mended.discard(image)
            if new and self.folder is not None:
                row = {"split": split.split, "image": index, **split.table.place(index), "reason": reason}
                with suppress(OSError):  # a full disk ends no training; who meets the image next lists it
                    append_line(self.folder / QUARANTINE, json.dumps(row))
                self._bad.update(self._listed() - self._mended)
            if len(self._bad) > self.most and is_bad is not None:
                self._mended |= {one for one in self._earlier - {image} if not is_bad(*one)}
                self._bad -= self._mended
                self._earlier.clear()
            if len(self._bad) > self.most:
                where = f"; they are listed in {self.folder / QUARANTINE}" if self.folder else ""
                raise DataError(
                    f"{split.table.name(index)}: {reason}; with it {plural(len(self._bad), 'image')} cannot be "
                    f"decoded, and data.max_bad allows {self.most:,}{where}; mend them, or write a larger data.max_bad"
                )

    def __len__(self) -> int:
        return len(self._bad)

    def _listed(self) -> set[tuple[str, int]]:
        return {(str(row["split"]), int(row["image"])) for row in quarantined(self.folder)} if self.folder else set()


def quarantined(folder: Path) -> list[dict[str, str | int]]:
    """The images that a run has listed as bad, each once; a line that a kill cut short is skipped."""
    rows: dict[tuple[object, object], dict[str, str | int]] = {}
    for row in read_rows(folder / QUARANTINE):
        if isinstance(row.get("split"), str) and isinstance(row.get("image"), int):
            rows.setdefault((row["split"], row["image"]), row)
    return list(rows.values())
