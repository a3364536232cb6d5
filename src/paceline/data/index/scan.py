"""Finds every image of a data set once, and opens what was found before when nothing has changed since."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index import file
from paceline.data.index.formats import Format, Found, Unit, listed, some_of, tfrecord, webdataset
from paceline.data.index.formats import folder as folders
from paceline.data.index.formats import pack as packs
from paceline.data.index.labels import labels_path
from paceline.data.index.splits import assemble
from paceline.data.index.table import Index, Strings, Table
from paceline.errors import DataError
from paceline.settings.data import Files

VERSION = 2
"""Goes up whenever an index of the same files would be another one."""

FORMATS: tuple[Format, ...] = (packs, folders, tfrecord, webdataset)
"""Asked in this order."""

Tell = Callable[[str, int, int], None]
"""Progress: what is done, how much of it, of how much."""

_LOOKED_INTO = 32
"""Folders that are looked into for a data set that may be meant."""
_THREADS = min(16, 4 * (os.cpu_count() or 1))


def recognized(folder: Path) -> bool:
    """Whether the folder holds encoded images in a format that is known."""
    return _format_of(folder) is not None


def open_index(data: Files, folder: Path, tell: Tell | None = None) -> Index:
    """The index of the images in a folder: scanned by the first process, opened by all others and ever after."""
    form = _format_of(folder)
    if form is None:
        raise DataError(
            f"{folder}: no images are here; expected class folders (train/ and val/), TFRecords "
            f"(train-00000-of-01024), WebDataset tars (train-000000.tar) or a Paceline pack{meant(folder)}"
        )
    name = f"index-{_digest(form, data, folder)}.bin"
    for place in file.places(folder):
        if (index := _opened(form, folder, place, name)) is not None:
            return index
    place_to_write = file.writable_place(folder)
    if place_to_write is None:
        units = form.units(folder, {})
        return assemble(form, data, folder, units, _scanned(form, folder, units, {}, tell))
    with file.locked(place_to_write):
        if (index := _opened(form, folder, place_to_write, name)) is not None:
            return index
        file.drop(place_to_write, file.HALF_WRITTEN)
        return _made(form, data, folder, place_to_write, name, tell)


def meant(folder: Path) -> str:
    """The end of a message on a folder that holds no data set: the data sets that lie right below it, if any do."""
    below = []
    for name in sorted(entry.name for entry in listed(folder) if entry.is_dir())[:_LOOKED_INTO]:
        with suppress(DataError):  # one that cannot be read is not meant
            below += [name] if recognized(folder / name) else []
    if len(below) == 1:
        return f"; did you mean --data {folder / below[0]}?"
    return f"; did you mean one of the folders in it: {some_of(below)}?" if below else ""


def _format_of(folder: Path) -> Format | None:
    return next((form for form in FORMATS if form.recognize(folder)), None)


def _made(form: Format, data: Files, folder: Path, place: Path, name: str, tell: Tell | None) -> Index:
    """Scan what changed, put everything together, and keep both."""
    before = _last_scan(place, form)
    units = form.units(folder, {unit: seen for unit, (seen, _) in before.items()})
    founds = _scanned(form, folder, units, before, tell)
    with suppress(OSError):  # a full disk makes the next start slower, no more
        if [seen for seen, _ in before.values()] != units:
            _keep_scan(place, form, units, founds)  # even where the settings are then refused
            file.drop(place, "index-*.bin")  # those of other settings speak of files as they were
    index = assemble(form, data, folder, units, founds)
    with suppress(OSError):
        _keep_index(place / name, index, units)
        return _opened(form, folder, place, name) or index
    return index


def _scanned(
    form: Format, folder: Path, units: Sequence[Unit], before: Mapping[str, tuple[Unit, Found]], tell: Tell | None
) -> list[Found]:
    """What is in every unit; of those that did not change, what was found before."""

    def one(unit: Unit) -> Found:
        found = form.scan(folder, unit)
        return replace(found, shards=_packed(found.shards), keys=_packed(found.keys))

    known = {unit.name: before[unit.name][1] for unit in units if before.get(unit.name, (None,))[0] == unit}
    changed = [unit for unit in units if unit.name not in known]
    with ThreadPoolExecutor(_THREADS) as pool:
        running = [pool.submit(one, unit) for unit in changed]
        try:
            for done, (unit, future) in enumerate(zip(changed, running, strict=True), start=1):
                known[unit.name] = future.result()
                if tell is not None:
                    tell(f"indexing {folder}", done, len(changed))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [known[unit.name] for unit in units]


def _packed(texts: Sequence[str] | Strings) -> Strings:
    return texts if isinstance(texts, Strings) else Strings.of(texts)


def _digest(form: Format, data: Files, folder: Path) -> str:
    """Stands for everything in the settings that an index depends on."""
    kept = {"name", "first_label", "validation", "use", "classes", "class_names"}
    matters: dict[str, Any] = data.model_dump(include=kept)
    if form is webdataset:  # the names lie in a file beside the tars, which is none of the units
        matters["kept_names"] = form.classes(folder)
    if data.labels is not None:
        try:
            matters["labels"] = hashlib.sha256(labels_path(data.labels, folder).read_bytes()).hexdigest()
        except OSError:
            matters["labels"] = None  # the fault is told where the labels are read
    text = json.dumps([VERSION, form.KIND, matters], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _signature(units: Sequence[Unit]) -> str:
    """Stands for the state of all files; the names inside a folder are covered by its time."""
    text = json.dumps([[unit.name, unit.part, *unit.stamp] for unit in units])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _opened(form: Format, folder: Path, place: Path, name: str) -> Index | None:
    """The index that is kept there, if nothing changed since."""
    stored = file.read(place / name)
    scanned = file.read(place / "scan.bin") if stored is not None else None
    if stored is None or scanned is None or stored.facts.get("version") != VERSION:
        return None
    units = form.units(folder, {unit.name: unit for unit in _units(scanned, form)})
    if stored.facts["units"] != _signature(units):
        return None
    facts = stored.facts
    return Index(
        form.KIND, folder, tuple(facts["classes"]), _table(stored, "training"), _table(stored, "validation"),
        tuple(facts["notes"]),
    )  # fmt: skip


def _keep_index(path: Path, index: Index, units: Sequence[Unit]) -> None:
    facts = {"version": VERSION, "units": _signature(units), "classes": index.classes, "notes": index.notes}
    arrays: dict[str, NDArray[Any]] = {}
    for split in ("training", "validation"):
        table: Table = getattr(index, split)
        arrays |= {f"{split}.rows": table.rows, f"{split}.objects": table.objects}
        for texts in ("shards", "keys"):
            strings: Strings = getattr(table, texts)
            arrays |= {f"{split}.{texts}": strings.blob, f"{split}.{texts}.ends": strings.ends}
    file.write(path, facts, arrays)


def _table(stored: file.Stored, split: str) -> Table:
    return Table(
        stored.arrays[f"{split}.rows"],
        _strings(stored, f"{split}.shards"),
        _strings(stored, f"{split}.keys"),
        stored.arrays[f"{split}.objects"],
    )


def _strings(stored: file.Stored, name: str) -> Strings:
    return Strings(stored.arrays[name], stored.arrays[f"{name}.ends"])


def _keep_scan(place: Path, form: Format, units: Sequence[Unit], founds: Sequence[Found]) -> None:
    """What was found, as it was found: whatever the settings, a changed unit alone is then scanned again."""
    described = [
        [
            unit.name,
            unit.part,
            unit.stamp,
            unit.below,
            len(found.rows),
            len(found.shards),
            len(found.objects),
            found.names,
            found.left_out,
        ]
        for unit, found in zip(units, founds, strict=True)
    ]
    shards, keys = (Strings.joined([_packed(getattr(found, name)) for found in founds]) for name in ("shards", "keys"))
    file.write(
        place / "scan.bin",
        {"version": VERSION, "kind": form.KIND, "units": described},
        {
            "rows": np.concatenate([found.rows for found in founds]),
            "objects": np.concatenate([found.objects for found in founds]),
            "shards": shards.blob, "shards.ends": shards.ends, "keys": keys.blob, "keys.ends": keys.ends,
        },
    )  # fmt: skip


def _units(scanned: file.Stored, form: Format) -> list[Unit]:
    if scanned.facts.get("version") != VERSION or scanned.facts.get("kind") != form.KIND:
        return []
    return [
        Unit(name, part, (stamp[0], stamp[1]), tuple(below)) for name, part, stamp, below, *_ in scanned.facts["units"]
    ]


def _last_scan(place: Path, form: Format) -> dict[str, tuple[Unit, Found]]:
    """Every unit of the last scan and what was in it."""
    scanned = file.read(place / "scan.bin")
    if scanned is None:
        return {}
    known, row, shard, thing = {}, 0, 0, 0
    for unit, said in zip(units := _units(scanned, form), scanned.facts["units"][: len(units)], strict=True):
        rows, shards, objects, names, left_out = said[4:]
        known[unit.name] = (
            unit,
            Found(
                scanned.arrays["rows"][row : row + rows],
                _some(_strings(scanned, "shards"), shard, shards),
                _some(_strings(scanned, "keys"), row, rows),
                scanned.arrays["objects"][thing : thing + objects],
                tuple(names),
                left_out,
            ),
        )
        row, shard, thing = row + rows, shard + shards, thing + objects
    return known


def _some(texts: Strings, first: int, count: int) -> Strings:
    start = int(texts.ends[first - 1]) if first else 0
    ends = texts.ends[first : first + count] - np.uint64(start)
    return Strings(texts.blob[start : start + int(ends[-1]) if count else start], ends)
