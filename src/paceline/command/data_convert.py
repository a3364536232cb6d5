"""paceline data convert: writes a data set as WebDataset tars or as files in class folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from paceline.command.data_source import existing_folder, read_settings
from paceline.command.tables import show_facts
from paceline.data.index.scan import open_index
from paceline.errors import DataError, SpecError
from paceline.progress import progress_bar
from paceline.visible import plural


def run(
    source: Path, out: Path, words: list[str], to: Literal["webdataset", "folder"], samples: int,
    shuffle: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a data set of any format as tars or as files, and print how many."""
    if to == "folder" and shuffle is not None:
        raise SpecError("--shuffle is for --to webdataset; files in folders have no order")
    from paceline.data.pack.convert import to_folder, to_webdataset

    with progress_bar() as progress:
        index = open_index(read_settings(words), existing_folder(source), progress, whole=True)
        try:
            if to == "folder":
                written = to_folder(index, out, progress)
            else:
                written = to_webdataset(index, out, samples, shuffle, progress)
        except OSError as fault:
            raise DataError(
                f"{fault.filename or out}: cannot be written: {fault.strerror or fault}; {out} is incomplete: remove "
                "it before the next try"
            ) from None
    facts: dict[str, Any] = {"format": to, "folder": str(out), "classes": len(index.classes)}
    for split, count in written["splits"].items():
        facts[split] = (
            count
            if isinstance(count, int)
            else f"{plural(count['samples'], 'sample')} in {plural(count['shards'], 'tar')}"
        )
    if written.get("without a class"):
        facts["skipped, without a class"] = written["without a class"]
    show_facts(facts, as_json)
