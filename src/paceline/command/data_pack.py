"""paceline data pack: writes a data set as a pack, or verifies one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.command.data_source import existing_folder, read_settings
from paceline.command.tables import show_facts
from paceline.data.index.scan import open_index
from paceline.errors import SpecError
from paceline.progress import progress_bar


def run(
    source: Path, out: Path | None, words: list[str], max_side: int | None, quality: int | None,
    processes: int | None, verify: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a pack of a data set, or complete it; or read a pack and compare every checksum."""
    if verify:
        _verify(source, out, as_json)
        return
    if out is None:
        raise SpecError(f"where to? write paceline data pack {source} OUT, with a new folder for OUT")
    from paceline.data.pack.transcode import LossyPreset
    from paceline.data.pack.writer import write_pack

    preset = None
    if max_side is not None or quality is not None:
        preset = LossyPreset(max_side, quality or LossyPreset.quality)
    start = time.monotonic()
    with progress_bar() as progress:
        index = open_index(read_settings(words), existing_folder(source), progress, whole=True)
        pack = write_pack(index, out, preset, processes, progress)
    facts: dict[str, Any] = {
        "pack": str(out),
        "images": pack.images,
        "in tiles": pack.tiled,
        "kept as they are": pack.images - pack.tiled,
        "bytes": pack.bytes,
        "share of the source": round(pack.bytes / max(pack.source_bytes, 1), 4),
        "verified": True,
    }
    facts |= {"was complete": True} if pack.was_complete else {"seconds": round(time.monotonic() - start, 1)}
    show_facts(facts, as_json)


def _verify(pack: Path, out: Path | None, as_json: bool) -> None:
    if out is not None:
        raise SpecError(f"--verify reads one pack; write paceline data pack {out} --verify")
    from paceline.data.pack.shards import verify_pack

    with progress_bar() as progress:
        images = verify_pack(pack, progress)
    show_facts({"pack": str(pack), "images": images, "verified": True}, as_json)
