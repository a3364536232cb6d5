"""Makes a pack of a data set: in parallel, going on where complete shards end, and verified."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.data.index import file
from paceline.data.index.scan import FORMATS, open_index
from paceline.data.index.table import Flag, Index, Rows, Strings, Table
from paceline.data.pack import libjpeg, shards
from paceline.data.pack.pool import prepared
from paceline.data.pack.shards import Checks, Packed, Tell
from paceline.data.pack.transcode import Job, Picture, Smaller
from paceline.errors import DataError
from paceline.settings.data import Files

SHARD_BYTES = 256 << 20
"""About how many bytes of the source go into one shard."""


@dataclass(frozen=True)
class Made:
    """What a pack holds."""

    images: int
    tiled: int
    source_bytes: int
    bytes: int
    again: bool
    """Whether it was complete already."""


@dataclass(frozen=True)
class _Division:
    """The images of one shard."""

    part: str
    table: Table
    number: int
    first: int
    last: int


def parts_of(index: Index) -> list[tuple[str, Table]]:
    """The parts of a data set; without a validation part, the whole of it."""
    if not len(index.validation):
        return [("all", index.training)]
    return [("training", index.training), ("validation", index.validation)]


def open_source(data: Files, folder: Path, tell: Tell | None = None) -> Index:
    """The index of a data set as it is kept: one without a validation part stays whole unless the settings part it."""
    form = next((form for form in FORMATS if form.recognize(folder)), None)
    if form is None or data.validation is not None or "validation" in {unit.part for unit in form.units(folder, {})}:
        return open_index(data, folder, tell)
    return open_index(data.model_copy(update={"validation": 0.0}), folder, tell)


def make_pack(
    index: Index,
    out: Path,
    smaller: Smaller | None = None,
    processes: int | None = None,
    tell: Tell | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Made:
    """Write every image of a data set into a pack in the folder `out`, or go on with it; verified at the end."""
    if smaller is None and not libjpeg.available():
        raise DataError(
            "packing without loss needs libjpeg with interface 62; install libjpeg-turbo, or write "
            "--max-side 500 --quality 90 for a smaller pack, which needs Pillow alone"
        )
    plan = {
        "paceline pack": shards.VERSION,
        "content": _content(index),
        "smaller": None if smaller is None else asdict(smaller),
        "shard bytes": shard_bytes,
    }
    divisions = [division for part, table in parts_of(index) for division in _divisions(part, table, shard_bytes)]
    with _claimed(out, plan):
        file.drop(out, file.HALF_WRITTEN)  # what a killed process left
        todo = [division for division in divisions if _finished(out, division) is None]
        _write_shards(index.folder, out, todo, divisions, smaller, processes, tell)
        parts = [_merge(out, part, table, index, divisions) for part, table in parts_of(index)]
        changed = [part for part in parts if not shards.is_written(out, part)]
        for part in changed:
            shards.write_part(out, part)
        shards.verify(out, tell)
    rows = [part.table.rows for part in parts]
    return Made(
        images=sum(map(len, rows)),
        tiled=sum(int(np.count_nonzero(some["flags"] & int(Flag.TILED))) for some in rows),
        source_bytes=sum(int(table.rows["length"].sum(dtype=np.int64)) for _, table in parts_of(index)),
        bytes=sum(int(some["length"].sum(dtype=np.int64)) for some in rows),
        again=not changed,
    )


def _content(index: Index) -> str:
    """A fingerprint of what is packed, wherever it lies."""
    digest = hashlib.blake2b(json.dumps(index.classes).encode(), digest_size=16)
    for part, table in parts_of(index):
        digest.update(part.encode())
        for column in ("length", "label", "width", "height", "flags", "objects"):
            digest.update(np.ascontiguousarray(table.rows[column]).tobytes())
        for array in (table.keys.blob, table.keys.ends, table.objects):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@contextmanager
def _claimed(out: Path, plan: dict[str, object]) -> Iterator[None]:
    """The folder for this pack alone; another data set in it is never touched."""
    path = out / shards.PLAN
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            if any(out.iterdir()):
                raise DataError(f"{out}: this folder is not empty and holds no pack; write a new folder")
            path.write_text(_text(plan))
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{out}: another process is writing this pack; wait for it") from None
            except OSError:  # a disk without locks
                pass
            text = file.read()
            if not text:  # a kill came before it was written
                file.write(_text(plan))
                file.flush()
            elif text != _text(plan):
                raise DataError(
                    f"{out}: this folder holds a pack of other images, or made with other settings; write a new folder"
                )
            yield
    except OSError as fault:
        raise DataError(f"{fault.filename or out}: cannot be written: {fault.strerror}") from None


def _text(plan: dict[str, object]) -> str:
    return json.dumps(plan, indent=1) + "\n"


def _divisions(part: str, table: Table, shard_bytes: int) -> list[_Division]:
    """Neighbors go together, so that the source is read and the pack is ranked in one order."""
    lengths = table.rows["length"].astype(np.int64)
    shares = (np.cumsum(lengths) - lengths) // shard_bytes
    firsts = np.flatnonzero(np.diff(shares, prepend=-1)).tolist()
    return [
        _Division(part, table, number, first, last)
        for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(lengths)], strict=True))
    ]


def _finished(out: Path, division: _Division) -> tuple[Rows, Checks] | None:
    return shards.finished_shard(out, division.part, division.number, division.last - division.first)


def _write_shards(
    folder: Path, out: Path, todo: list[_Division], divisions: list[_Division], smaller: Smaller | None,
    processes: int | None, tell: Tell | None,
) -> None:  # fmt: skip
    """Write the shards that are missing, one after the other, from pictures that are prepared in parallel."""
    if not todo:
        return
    total = sum(division.last - division.first for division in divisions)
    done = total - sum(division.last - division.first for division in todo)
    with closing(prepared(_jobs(folder, todo, smaller), processes)) as pictures:
        for division in todo:
            rows = division.table.rows[division.first : division.last].copy()
            checks = np.zeros(len(rows), np.uint32)
            with shards.Shard(out, division.part, division.number) as shard:
                for row in range(len(rows)):
                    picture = next(pictures)
                    place, checks[row] = shard.add(picture.encoded)
                    _fill(rows, row, division.number, place, picture)
                    done += 1
                    if tell is not None:
                        tell("packing", done, total)
                shard.finish(rows, checks)


def _fill(rows: Rows, row: int, shard: int, place: int, picture: Picture) -> None:
    rows["shard"][row], rows["offset"][row], rows["length"][row] = shard, place, len(picture.encoded)
    rows["width"][row], rows["height"][row], rows["flags"][row] = picture.width, picture.height, picture.flags


def _jobs(folder: Path, todo: list[_Division], smaller: Smaller | None) -> Iterator[Job]:
    for division in todo:
        for row in division.table.rows[division.first : division.last]:
            path = folder / division.table.shards[int(row["shard"])]
            yield Job(
                str(path), int(row["offset"]), int(row["length"]), int(row["width"]), int(row["height"]),
                int(row["flags"]), smaller,
            )  # fmt: skip


def _merge(out: Path, part: str, table: Table, index: Index, divisions: list[_Division]) -> Packed:
    """The index of a part, from the rows of its shards."""
    mine = [division for division in divisions if division.part == part]
    found = [_finished(out, division) for division in mine]
    assert None not in found, "every shard was just written"
    rows = np.concatenate([some[0] for some in found if some is not None] or [table.rows[:0]])
    checks = np.concatenate([some[1] for some in found if some is not None] or [np.zeros(0, np.uint32)])
    names = Strings.of(shards.shard_name(part, division.number) for division in mine)
    return Packed(part, index.classes, Table(rows, names, table.keys, table.objects), checks)
