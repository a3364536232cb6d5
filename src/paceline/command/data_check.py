"""paceline data check: decodes every image of a data set once and lists those that training could not use."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.command.data_source import existing_folder, read_settings
from paceline.command.tables import show_facts
from paceline.data.index.scan import open_index
from paceline.data.index.table import Index
from paceline.machine import this_machine
from paceline.progress import progress_bar
from paceline.settings.data import Files
from paceline.visible import one_line

_SHOWN = 12
"""How many classes without images are named."""


def run(source: Path, words: list[str], threads: int | None, as_json: bool) -> int:
    """Print a line for each bad image, then a summary; returns 1 where any image is bad."""
    data = read_settings(words)
    with progress_bar() as progress:
        index = open_index(data, existing_folder(source), progress, whole=True)
        import torch

        from paceline.data.inspect.check import find_bad_images

        torch.set_num_threads(1)  # the images are shared out among threads already
        bad = []
        with closing(find_bad_images(index, data, threads or this_machine().cores, progress)) as images:
            for image in images:
                bad.append(image)
                if not as_json:
                    print(one_line(f"{image.name}: {image.reason}"), flush=True)
    facts = _facts(index, data, Counter(image.kind for image in bad))
    if as_json:
        print(json.dumps(facts | {"bad": [asdict(image) for image in bad]}, indent=1))
    else:
        show_facts(_lines(facts), as_json=False)
    return 1 if bad else 0


def _facts(index: Index, data: Files, kinds: Counter[str]) -> dict[str, Any]:
    from paceline.data.inspect.check import count_repeated
    from paceline.data.inspect.describe import class_sizes

    tables = [table for _, table in index.splits()]
    images = sum(map(len, tables))
    empty = (class_sizes(index, index.training) == 0).nonzero()[0].tolist()
    return {
        "folder": str(index.folder),
        "format": index.kind,
        "images": images,
        "bad_images": kinds.total(),
        "allowed": data.bad_allowed(images),
        "kinds": dict(kinds.most_common()),
        "same_key_and_label": sum(map(count_repeated, tables)),
        "classes": len(index.classes),
        "classes_without_training_images": [index.classes[number] for number in empty],
        "notes": list(index.notes),
    }


def _lines(facts: dict[str, Any]) -> dict[str, Any]:
    """The summary as people read it."""
    bad, allowed = facts["bad_images"], facts["allowed"]
    lines: dict[str, Any] = {"format": facts["format"], "images": facts["images"], "bad images": bad}
    lines |= {f"- {kind}": count for kind, count in facts["kinds"].items()}
    if bad:
        ends = "a run would end: repair them, or write a larger data.max_bad"
        lines["bad images allowed"] = f"{allowed:,}: {ends if bad > allowed else 'a run replaces them'}"
    lines["same key and label as another"] = facts["same_key_and_label"]
    lines["classes"] = facts["classes"]
    empty = facts["classes_without_training_images"]
    if empty:
        names = ", ".join(empty[:_SHOWN]) + (", ..." if len(empty) > _SHOWN else "")
        lines["- without training images"] = f"{len(empty):,}: {names}"
    return lines | {f"note {number}" if number > 1 else "note": note for number, note in enumerate(facts["notes"], 1)}
