"""Opens the index of a data set: scans its files the first time, and reuses the result while nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.index import file
from paceline.data.index.formats import Format, ScanUnit, UnitImages, first_few, tfrecord, visible_entries, webdataset
from paceline.data.index.formats import folder as folders
from paceline.data.index.formats import pack as packs
from paceline.data.index.image_header import HEIF_ENDINGS, RAW_ENDINGS, heif_installed
from paceline.data.index.label_file import LabelKey, labels_path
from paceline.data.index.splits import EvaluationFiles, assemble_index
from paceline.data.index.table import Index, Strings, Table
from paceline.errors import DataError
from paceline.files import UNFINISHED
from paceline.progress import Progress, notify, silent
from paceline.settings.data import Files

INDEX_VERSION = 5
"""Goes up whenever the same files would get another index, or the format of the file changes."""

FORMATS: tuple[Format, ...] = (packs, folders, tfrecord, webdataset)
"""Asked in this order whether a folder is theirs."""

_SCAN = "scan.safetensors"
_SUGGESTED_FROM = 32
"""How many subfolders to search for a suggestion."""
_THREADS = min(16, 4 * (os.cpu_count() or 1))


def holds_images(folder: Path) -> bool:
    """Whether the folder holds encoded images in a known format."""
    return _format_of(folder) is not None


def open_index(data: Files, folder: Path, progress: Progress = silent, whole: bool = False) -> Index:
    """Open the index of the images in a folder; the first process scans the files, all others and later ones reuse it.

    With `whole`, data that have no validation split stay in one piece, unless data.validation says otherwise.
    """
    form = _format_of(folder)
    if form is None:
        refuse_unread(folder)
        raise DataError(
            f"{folder}: no images are here; expected class folders (train/ and val/), TFRecords "
            f"(train-00000-of-01024), WebDataset tars (train-000000.tar) or a Paceline pack{suggestion(folder)}"
        )
    source = _Source(form, data, folder, whole)
    for index_folder in file.index_folders(folder):
        if (index := _read_index(source, index_folder)) is not None:
            return index
    writable = file.writable_folder(folder)
    if writable is None:
        units = form.units(folder, {})
        return source.assemble(units, _scan(source, units, {}, progress))
    with file.locked(writable):
        if (index := _read_index(source, writable)) is not None:
            return index
        file.remove_files(writable, UNFINISHED)
        return _build_index(source, writable, progress)


def refuse_unread(folder: Path) -> None:
    """Refuse a folder without images that has those of phones, while nothing here reads them, or of cameras."""
    if not heif_installed() and folders.holds_ending(folder, HEIF_ENDINGS):
        raise DataError(f"{folder}: its images are .heic files, which pillow-heif reads; write pip install pillow-heif")
    if folders.holds_ending(folder, RAW_ENDINGS):
        raise DataError(
            f"{folder}: its images are a camera's raw files, such as .cr2 or .nef; save them as JPEG or PNG, and name "
            "the folder of those"
        )


def suggestion(folder: Path) -> str:
    """The end of a message about a folder without a data set: the data sets right below it, if there are any."""
    names = []
    for name in sorted(entry.name for entry in visible_entries(folder) if entry.is_dir())[:_SUGGESTED_FROM]:
        with suppress(DataError):  # one that cannot be read is not meant
            names += [name] if holds_images(folder / name) else []
    if len(names) == 1:
        return f"; did you mean --data {folder / names[0]}?"
    return f"; did you mean one of the folders in it: {first_few(names)}?" if names else ""


def _format_of(folder: Path) -> Format | None:
    return next((form for form in FORMATS if form.recognize(folder)), None)


@dataclass(frozen=True)
class _Source:
    """What an index is made of: the files in a folder, read by the settings."""

    form: Format
    data: Files
    folder: Path
    whole: bool

    def assemble(self, units: Sequence[ScanUnit], images: Sequence[UnitImages]) -> Index:
        return assemble_index(self.form, self.data, self.folder, units, images, self.whole)

    def file_name(self) -> str:
        """The name of the index file, with a digest of every setting that the index depends on."""
        names = {"name", "first_label", "validation", "fraction", "classes", "class_names"}
        settings: dict[str, Any] = self.data.model_dump(include=names)
        settings |= {"whole": self.whole, "evaluate_only": isinstance(self.data, EvaluationFiles)}
        settings["heif"] = heif_installed()
        if self.form is webdataset:  # the names are in a file beside the tars, which is not a scan unit
            settings["stored_names"] = self.form.classes(self.folder)
        settings["labels"] = [self._digest(key) for key in ("labels", "relabel")]
        text = json.dumps([INDEX_VERSION, self.form.KIND, settings], sort_keys=True)
        return f"index-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.safetensors"

    def _digest(self, key: LabelKey) -> str | None:
        """A digest of a file of labels, None without one; that of a file that cannot be read, which is told where it is
        read, is the digest of no index that was ever written."""
        path = labels_path(self.data, key, self.folder)
        with suppress(OSError):
            return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None
        return "cannot be read"


def _build_index(source: _Source, index_folder: Path, progress: Progress) -> Index:
    """Scan what changed, assemble the index, and write both the scan and the index."""
    before = _read_scan(source.form, index_folder)
    units = source.form.units(source.folder, {name: unit for name, (unit, _) in before.items()})
    images = _scan(source, units, before, progress)
    with suppress(OSError):  # a full disk only makes the next start slower
        if [unit for unit, _ in before.values()] != units:
            _write_scan(source.form, index_folder, units, images)  # even where the settings are then refused
            file.remove_files(index_folder, "index-*")  # those of other settings describe the files as they were
    index = source.assemble(units, images)
    with suppress(OSError):
        _write_index(index_folder / source.file_name(), index, units)
        return _read_index(source, index_folder) or index
    return index


def _scan(
    source: _Source,
    units: Sequence[ScanUnit],
    before: Mapping[str, tuple[ScanUnit, UnitImages]],
    progress: Progress,
) -> list[UnitImages]:
    """The images of every unit; those of unchanged units come from the last scan."""

    def scan_unit(unit: ScanUnit) -> UnitImages:
        images = source.form.scan(source.folder, unit)
        return replace(images, shards=_as_strings(images.shards), keys=_as_strings(images.keys))

    by_name = {unit.name: before[unit.name][1] for unit in units if before.get(unit.name, (None,))[0] == unit}
    changed = [unit for unit in units if unit.name not in by_name]
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(scan_unit, unit) for unit in changed]
        try:
            for done, (unit, future) in enumerate(zip(changed, futures, strict=True), start=1):
                by_name[unit.name] = future.result()
                progress(f"indexing {source.folder}", done, len(changed))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [by_name[unit.name] for unit in units]


def _as_strings(texts: Sequence[str] | Strings) -> Strings:
    return texts if isinstance(texts, Strings) else Strings.of(texts)


def _stamps_digest(units: Sequence[ScanUnit]) -> str:
    """A digest of the state of all files; the stamp of a folder covers the names inside it."""
    text = json.dumps([[unit.name, unit.split, *unit.stamp] for unit in units])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _report(path: Path) -> None:
    notify(f"{path}: this index was damaged; it is made again")
    with suppress(OSError):  # so that it is said once
        path.unlink()


def _read_index(source: _Source, index_folder: Path) -> Index | None:
    """The index that an earlier process wrote, if nothing changed since."""
    stored = file.read_arrays(index_folder / source.file_name(), damaged=_report)
    scanned = file.read_arrays(index_folder / _SCAN, False, _report) if stored is not None else None
    if stored is None or scanned is None or stored.header.get("version") != INDEX_VERSION:
        return None
    before = {unit.name: unit for unit in _units_of(scanned, source.form)}
    if stored.header["stamps"] != _stamps_digest(source.form.units(source.folder, before)):
        return None
    tables = _read_table(stored, "training"), _read_table(stored, "validation")
    return Index(
        source.form.KIND, source.folder, tuple(stored.header["classes"]), *tables, tuple(stored.header["notes"])
    )


def _write_index(path: Path, index: Index, units: Sequence[ScanUnit]) -> None:
    header = {"version": INDEX_VERSION, "stamps": _stamps_digest(units)}
    header |= {"classes": index.classes, "notes": index.notes}
    arrays: dict[str, NDArray[Any]] = {}
    for split, table in (("training", index.training), ("validation", index.validation)):
        arrays |= {f"{split}.rows": table.rows, f"{split}.objects": table.objects}
        arrays |= _string_arrays(f"{split}.shards", table.shards) | _string_arrays(f"{split}.keys", table.keys)
    file.write_arrays(path, header, arrays)


def _read_table(stored: file.ArrayFile, split: str) -> Table:
    rows, objects = stored.arrays[f"{split}.rows"], stored.arrays[f"{split}.objects"]
    return Table(rows, _strings(stored, f"{split}.shards"), _strings(stored, f"{split}.keys"), objects)


def _string_arrays(name: str, strings: Strings) -> dict[str, NDArray[Any]]:
    return {name: strings.blob, f"{name}.ends": strings.ends}


def _strings(stored: file.ArrayFile, name: str) -> Strings:
    return Strings(stored.arrays[name], stored.arrays[f"{name}.ends"])


def _write_scan(form: Format, index_folder: Path, units: Sequence[ScanUnit], images: Sequence[UnitImages]) -> None:
    """Write what the scan found, before settings apply: later only changed units are scanned, whatever the settings."""
    described = [
        [unit.name, unit.split, unit.stamp, unit.subfolders, unit.depth, len(one.rows), len(one.shards),
         len(one.objects), one.names, one.skipped]
        for unit, one in zip(units, images, strict=True)
    ]  # fmt: skip
    rows = np.concatenate([one.rows for one in images])
    objects = np.concatenate([one.objects for one in images])
    shards, keys = (Strings.joined([_as_strings(getattr(one, name)) for one in images]) for name in ("shards", "keys"))
    file.write_arrays(
        index_folder / _SCAN,
        {"version": INDEX_VERSION, "kind": form.KIND, "heif": heif_installed(), "units": described},
        {"rows": rows, "objects": objects, **_string_arrays("shards", shards), **_string_arrays("keys", keys)},
    )


def _units_of(scanned: file.ArrayFile, form: Format) -> list[ScanUnit]:
    expected = {"version": INDEX_VERSION, "kind": form.KIND, "heif": heif_installed()}
    if any(scanned.header.get(key) != value for key, value in expected.items()):
        return []
    return [
        ScanUnit(name, split, (stamp[0], stamp[1]), tuple(subfolders), depth)
        for name, split, stamp, subfolders, depth, *_ in scanned.header["units"]
    ]


def _read_scan(form: Format, index_folder: Path) -> dict[str, tuple[ScanUnit, UnitImages]]:
    """Every unit of the last scan and its images, by name."""
    scanned = file.read_arrays(index_folder / _SCAN, damaged=_report)
    if scanned is None:
        return {}
    # The images of all units are concatenated in the file; the header has the counts of each unit.
    by_name, row, shard, thing = {}, 0, 0, 0
    units = _units_of(scanned, form)
    for unit, described in zip(units, scanned.header["units"][: len(units)], strict=True):
        rows, shards, objects, names, skipped = described[5:]
        by_name[unit.name] = (
            unit,
            UnitImages(
                scanned.arrays["rows"][row : row + rows],
                _strings(scanned, "shards").slice(shard, shards),
                _strings(scanned, "keys").slice(row, rows),
                scanned.arrays["objects"][thing : thing + objects],
                tuple(names),
                skipped,
            ),
        )
        row, shard, thing = row + rows, shard + shards, thing + objects
    return by_name
