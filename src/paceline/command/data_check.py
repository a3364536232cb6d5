"""paceline data check: decodes every image of a data set once and says which cannot be trained on."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.command.data_pack import existing, print_any_name, progress, settings
from paceline.command.tables import show_facts
from paceline.data.index.table import Index
from paceline.data.pack.writer import open_source
from paceline.machine import this_machine
from paceline.settings.data import Files

_SHOWN = 12
"""Classes without images that are named."""


def run(source: Path, words: list[str], threads: int | None, as_json: bool) -> int:
    """Print a line for each bad image, then what else there is to know; 1 where any is bad."""
    print_any_name()
    data = settings(words)
    with progress() as tell:
        index = open_source(data, existing(source), tell)
        import torch

        from paceline.data.inspect.check import examine

        torch.set_num_threads(1)  # the images are shared out among threads already
        faults = []
        with closing(examine(index, data, threads or this_machine().cores, tell)) as found:
            for fault in found:
                faults.append(fault)
                if not as_json:
                    print(f"{fault.name}: {fault.reason}", flush=True)
    facts = _facts(index, data, Counter(fault.kind for fault in faults))
    if as_json:
        print(json.dumps(facts | {"bad": [asdict(fault) for fault in faults]}, indent=1))
    else:
        show_facts(_lines(facts), as_json=False)
    return 1 if faults else 0


def _facts(index: Index, data: Files, kinds: Counter[str]) -> dict[str, Any]:
    from paceline.data.inspect.check import images_of, parts_of, repeated

    parts = parts_of(index)
    images = sum(len(table) for _, table in parts)
    empty = images_of(index, index.training) == 0
    return {
        "folder": str(index.folder),
        "format": index.kind,
        "images": images,
        "bad_images": kinds.total(),
        "allowed": data.bad_allowed(images),
        "kinds": dict(kinds.most_common()),
        "same_key_and_label": sum(repeated(table) for _, table in parts),
        "classes": len(index.classes),
        "classes_without_training_images": [name for name, none in zip(index.classes, empty, strict=True) if none],
        "notes": list(index.notes),
    }


def _lines(facts: dict[str, Any]) -> dict[str, Any]:
    """The same for people."""
    bad, allowed = facts["bad_images"], facts["allowed"]
    said: dict[str, Any] = {"format": facts["format"], "images": facts["images"], "bad images": bad}
    said |= {f"- {kind}": count for kind, count in facts["kinds"].items()}
    if bad:
        more = "a run would end: mend them, or write a larger data.max_bad" if bad > allowed else "a run replaces them"
        said["bad images allowed"] = f"{allowed:,}: {more}"
    said["same key and label as another"] = facts["same_key_and_label"]
    said["classes"] = facts["classes"]
    empty = facts["classes_without_training_images"]
    if empty:
        names = ", ".join(empty[:_SHOWN]) + (", ..." if len(empty) > _SHOWN else "")
        said["- without training images"] = f"{len(empty):,}: {names}"
    return said | {"note" if place == 0 else f"note {place + 1}": note for place, note in enumerate(facts["notes"])}
