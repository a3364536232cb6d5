"""paceline data: packs of images, and images for the rest of the world."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.command.tables import show_facts
from paceline.data.pack.shards import Tell
from paceline.errors import DataError, SpecError
from paceline.job import console
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.read import override, parse


def pack(
    source: Path, out: Path | None, words: list[str], max_side: int | None, quality: int | None,
    processes: int | None, verify: bool, as_json: bool,
) -> None:  # fmt: skip
    """Make a pack of a data set, or go on with it; or read a pack and compare every checksum."""
    if verify:
        if out is not None:
            raise SpecError(f"--verify reads one pack; write paceline data pack {out} --verify")
        from paceline.data.pack import shards as packs

        with progress() as tell:
            images = packs.verify(source, tell)
        show_facts({"pack": str(source), "images": images, "verified": True}, as_json)
        return
    if out is None:
        raise SpecError(f"where to? write paceline data pack {source} OUT, with a new folder for OUT")
    from paceline.data.pack.transcode import Smaller
    from paceline.data.pack.writer import make_pack, open_source

    smaller = None
    if max_side is not None or quality is not None:
        smaller = Smaller(max_side, quality or Smaller.quality)
    start = time.monotonic()
    with progress() as tell:
        made = make_pack(open_source(settings(words), existing(source), tell), out, smaller, processes, tell)
    facts: dict[str, Any] = {
        "pack": str(out),
        "images": made.images,
        "in tiles": made.tiled,
        "kept as they are": made.images - made.tiled,
        "bytes": made.bytes,
        "share of the source": round(made.bytes / max(made.source_bytes, 1), 4),
        "verified": True,
    }
    facts |= {"was complete": True} if made.again else {"seconds": round(time.monotonic() - start, 1)}
    show_facts(facts, as_json)


def convert(
    source: Path, out: Path, words: list[str], to: Literal["webdataset", "folder"], samples: int,
    shuffle: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a data set as WebDataset tars or as files in class folders."""
    if to == "folder" and shuffle is not None:
        raise SpecError("--shuffle is for --to webdataset; files in folders have no order")
    from paceline.data.pack.convert import to_folder, to_webdataset
    from paceline.data.pack.writer import open_source

    with progress() as tell:
        index = open_source(settings(words), existing(source), tell)
        try:
            made = to_folder(index, out, tell) if to == "folder" else to_webdataset(index, out, samples, shuffle, tell)
        except OSError as fault:
            raise DataError(
                f"{fault.filename or out}: cannot be written: {fault.strerror or fault}; {out} is not whole: remove "
                "it before the next try"
            ) from None
    facts: dict[str, Any] = {"format": to, "folder": str(out), "classes": len(index.classes)}
    for part, said in made["parts"].items():
        facts[part] = said if isinstance(said, int) else f"{said['samples']:,} samples in {said['shards']:,} tars"
    if made.get("without a class"):
        facts["left out, without a class"] = made["without a class"]
    show_facts(facts, as_json)


def settings(words: list[str]) -> Files:
    """The settings of a data set from KEY=VALUE words, as a recipe's `data` has them."""
    tree = parse("{name: images}", "data")
    for word in words:
        override(tree, word.removeprefix("data."), Files)
    return build(Files, tree)


def existing(source: Path) -> Path:
    """The folder of a data set."""
    if not source.is_dir():
        raise DataError(f"{source}: there is no such folder; write the folder that holds the images")
    return source


def print_any_name() -> None:
    """Let names that the output cannot hold be shown with escapes: a name need not be UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar on a terminal, for whatever tells how far it is; nothing elsewhere."""
    shown = Progress(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console(), disable=not console().is_terminal,
    )  # fmt: skip
    tasks: dict[str, Any] = {}
    with shown:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)

        yield tell
