"""Writes a data set into a pack: in parallel, resumable shard by shard, and verified at the end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.data.index.file import remove_files
from paceline.data.index.table import Flag, Index, Rows, Strings, Table
from paceline.data.pack import libjpeg, shards
from paceline.data.pack.pool import ordered_pool
from paceline.data.pack.shards import Checksums, PackedSplit
from paceline.data.pack.transcode import LossyPreset, PackedImage, SourceImage
from paceline.errors import DataError
from paceline.files import UNFINISHED
from paceline.progress import Progress, silent

SHARD_BYTES = 256 << 20
"""About how many bytes of the source go into one shard."""


@dataclass(frozen=True)
class PackSummary:
    """What a pack holds."""

    images: int
    tiled: int
    source_bytes: int
    bytes: int
    was_complete: bool


@dataclass(frozen=True)
class _ShardPlan:
    """The images, from `first` up to `last`, of one split that go into one shard."""

    split: str
    table: Table
    shard: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def path(self, out: Path) -> Path:
        return out / shards.shard_name(self.split, self.shard)

    def finished(self, out: Path) -> tuple[Rows, Checksums] | None:
        return shards.finished_shard(self.path(out), len(self))


def splits_to_write(index: Index) -> list[tuple[str, Table]]:
    """The splits of a data set under their names in packs; without validation images there is one, `all`."""
    if not len(index.validation):
        return [("all", index.training)]
    return [("training", index.training), ("validation", index.validation)]


def write_pack(
    index: Index,
    out: Path,
    preset: LossyPreset | None = None,
    processes: int | None = None,
    progress: Progress = silent,
    shard_bytes: int = SHARD_BYTES,
) -> PackSummary:
    """Write every image of a data set into a pack in the folder `out`, or complete it, and verify the result."""
    if preset is None and not libjpeg.available():
        raise DataError(
            "packing without loss needs libjpeg with interface 62; install libjpeg-turbo, or write "
            "--max-side 500 --quality 90 for a smaller pack, which needs Pillow alone"
        )
    plan = {
        "paceline pack": shards.PACK_VERSION,
        "content": _content_digest(index),
        "smaller": None if preset is None else asdict(preset),
        "shard bytes": shard_bytes,
    }
    splits = splits_to_write(index)
    plans = [shard for split, table in splits for shard in _shard_plans(split, table, shard_bytes)]
    with _claimed(out, plan):
        remove_files(out, UNFINISHED)  # what a killed process left
        _write_shards(index.folder, out, plans, preset, processes, progress)
        packed = [_merge(out, split, table, index, plans) for split, table in splits]
        changed = [split for split in packed if not shards.is_written(out, split)]
        for split in changed:
            shards.write_split(out, split)
        shards.verify_pack(out, progress)
    rows = np.concatenate([split.table.rows for split in packed])
    return PackSummary(
        images=len(rows),
        tiled=int(np.count_nonzero(rows["flags"] & int(Flag.TILED))),
        source_bytes=sum(int(table.rows["length"].sum(dtype=np.int64)) for _, table in splits),
        bytes=int(rows["length"].sum(dtype=np.int64)),
        was_complete=not changed,
    )


def _content_digest(index: Index) -> str:
    """A digest of what is packed, wherever it lies."""
    digest = hashlib.blake2b(json.dumps(index.classes).encode(), digest_size=16)
    for split, table in splits_to_write(index):
        digest.update(split.encode())
        for column in ("length", "label", "width", "height", "flags", "objects"):
            digest.update(np.ascontiguousarray(table.rows[column]).tobytes())
        for array in (table.keys.blob, table.keys.ends, table.objects):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@contextmanager
def _claimed(out: Path, plan: dict[str, object]) -> Iterator[None]:
    """Hold the folder for this pack alone; a folder with anything else in it is never touched."""
    path = out / shards.PLAN
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            if any(out.iterdir()):
                raise DataError(f"{out}: this folder is not empty and holds no pack; write a new folder")
            path.write_text(_plan_text(plan))
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{out}: another process is writing this pack; wait for it") from None
            except OSError:  # a disk without locks
                pass
            text = file.read()
            if not text:  # a kill came before it was written
                file.write(_plan_text(plan))
                file.flush()
            elif text != _plan_text(plan):
                raise DataError(
                    f"{out}: this folder holds a pack of other images, or made with other settings; write a new folder"
                )
            yield
    except OSError as fault:
        raise DataError(f"{fault.filename or out}: cannot be written: {fault.strerror}") from None


def _plan_text(plan: dict[str, object]) -> str:
    return json.dumps(plan, indent=1) + "\n"


def _shard_plans(split: str, table: Table, shard_bytes: int) -> list[_ShardPlan]:
    """Cut a split into shards of neighbors, so that the source is read, and the pack sorted, in one order."""
    lengths = table.rows["length"].astype(np.int64)
    # An image belongs to the shard that its first byte falls into when all images stand one after the other.
    shard_of_image = (np.cumsum(lengths) - lengths) // shard_bytes
    firsts = np.flatnonzero(np.diff(shard_of_image, prepend=-1)).tolist()
    return [
        _ShardPlan(split, table, shard, first, last)
        for shard, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(lengths)], strict=True))
    ]


def _write_shards(
    folder: Path, out: Path, plans: list[_ShardPlan], preset: LossyPreset | None, processes: int | None,
    progress: Progress,
) -> None:  # fmt: skip
    """Write the missing shards one after the other, from images that are transcoded in parallel."""
    missing = [plan for plan in plans if plan.finished(out) is None]
    if not missing:
        return
    total = sum(map(len, plans))
    done = total - sum(map(len, missing))
    with closing(ordered_pool(_source_images(folder, missing, preset), processes)) as images:
        for plan in missing:
            rows = plan.table.rows[plan.first : plan.last].copy()
            checksums = np.zeros(len(rows), np.uint32)
            with shards.new_shard(plan.path(out)) as shard:
                for index in range(len(rows)):
                    image = next(images)
                    _fill_row(rows, index, plan.shard, shard.tell(), image)
                    checksums[index] = zlib.crc32(image.encoded)
                    shard.write(image.encoded)
                    done += 1
                    progress("packing", done, total)
            shards.finish_shard(plan.path(out), rows, checksums)


def _fill_row(rows: Rows, index: int, shard: int, offset: int, image: PackedImage) -> None:
    rows["shard"][index], rows["offset"][index], rows["length"][index] = shard, offset, len(image.encoded)
    rows["width"][index], rows["height"][index], rows["flags"][index] = image.width, image.height, image.flags


def _source_images(folder: Path, plans: list[_ShardPlan], preset: LossyPreset | None) -> Iterator[SourceImage]:
    for plan in plans:
        for image in range(plan.first, plan.last):
            path, offset, length = plan.table.span(image)
            width, height, flags = (int(plan.table.rows[name][image]) for name in ("width", "height", "flags"))
            yield SourceImage(str(folder / path), offset, length, width, height, flags, preset)


def _merge(out: Path, split: str, table: Table, index: Index, plans: list[_ShardPlan]) -> PackedSplit:
    """The index of a split, from the rows of its shards."""
    own = [plan for plan in plans if plan.split == split]
    finished = [result for plan in own if (result := plan.finished(out)) is not None]
    assert len(finished) == len(own), "every shard was just written"
    rows = np.concatenate([table.rows[:0], *(rows for rows, _ in finished)])
    checksums = np.concatenate([np.zeros(0, np.uint32), *(checksums for _, checksums in finished)])
    names = Strings.of(shards.shard_name(split, plan.shard) for plan in own)
    return PackedSplit(split, index.classes, Table(rows, names, table.keys, table.objects), checksums)
