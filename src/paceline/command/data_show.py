"""paceline data show: describes a data set, and draws a contact sheet of its augmented images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.command.data_source import existing_folder, read_settings
from paceline.command.tables import show_facts, show_rows
from paceline.data.index.locate import locate
from paceline.data.index.scan import open_index
from paceline.data.index.table import Index
from paceline.errors import DataError, SpecError
from paceline.files import disk_faults
from paceline.job import plan_job, read_placement, read_recipe
from paceline.progress import progress_bar
from paceline.settings.build import build
from paceline.settings.data import Data, Files
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe

_PAGE = (
    "{model: resnet8, global_batch: 16, epochs: 90, optimizer: {name: sgd, lr: 0.1}, schedule: constant, "
    "augment: {flip: true}}"
)
"""The recipe of a sheet for which none is given: the usual crop and flip."""
_MOST_CLASSES = 12
"""Up to so many classes are all listed; of more, the first and the last few."""
_IMAGES, _COLUMNS = 16, 8


def run(source: Path, words: list[str], sheet: Path | None, as_json: bool) -> None:
    """Describe a data set; with a sheet, also draw what the loader delivers of it."""
    recipe = _read(words)
    assert isinstance(recipe.data, Files)
    if sheet is not None and sheet.suffix.lower() != ".png":
        raise SpecError(f"--sheet {sheet}: a contact sheet is a PNG file; write --sheet {sheet.with_suffix('.png')}")
    with progress_bar() as progress:
        index = open_index(recipe.data, existing_folder(source), progress, whole=True)
    from paceline.data.inspect.describe import describe_data

    facts = describe_data(index)
    if sheet is not None:
        facts["sheet"] = str(sheet)
        _write_sheet(recipe, index, sheet)
    if as_json:
        print(json.dumps({**facts, "images of each class": _classes(index)}, indent=1))
        return
    show_facts(_lines(facts), as_json=False)
    print()
    show_rows(_first_and_last(_classes(index)), as_json=False)


def _read(words: list[str]) -> Recipe:
    """The recipe that the words name and override; without a name, the words are settings of the data."""
    if words and "=" not in words[0]:
        recipe, _ = read_recipe(words[0], words[1:])
        data = recipe.data or Files(name="images")
        if not isinstance(data, Files):
            raise SpecError(f"{words[0]} trains on {data.name}, which is not in files; write data=images after it")
        return recipe.model_copy(update={"data": data})
    page = build(Recipe, parse(_PAGE, "show"))
    return page.model_copy(update={"data": read_settings(words)})


def _classes(index: Index) -> list[dict[str, Any]]:
    from paceline.data.inspect.describe import class_sizes

    counts = [class_sizes(index, table).tolist() for table in (index.training, index.validation)]
    return [
        {"class": name, "training images": trained, "validation images": validated}
        for name, trained, validated in zip(index.classes, *counts, strict=True)
    ]


def _first_and_last(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, or the first and the last of many."""
    if len(rows) <= _MOST_CLASSES:
        return rows
    gap = {**dict.fromkeys(rows[0], "..."), "class": f"... {len(rows) - _MOST_CLASSES + 2:,} more"}
    return [*rows[: _MOST_CLASSES // 2 - 1], gap, *rows[1 - _MOST_CLASSES // 2 :]]


def _lines(facts: dict[str, Any]) -> dict[str, Any]:
    """The description as people read it: without zeros, and sizes in a line."""
    lines: dict[str, Any] = {}
    for name, value in facts.items():
        match name, value:
            case "width" | "height", dict():
                lines[name] = f"{value['smallest']:,} to {value['largest']:,} pixels, median {value['median']:,}"
            case "encodings", dict():
                lines |= {kind: count for kind, count in value.items() if count}
            case "notes", list():
                lines |= {f"note {number}" if number > 1 else "note": note for number, note in enumerate(value, 1)}
            case "turned by EXIF" | "with objects" | "labels outside the classes", 0:
                continue
            case _:
                lines[name] = value
    return lines


def _write_sheet(recipe: Recipe, index: Index, sheet: Path) -> None:
    """Draw training images in pairs: each at two of its positions in the endless list, one below the other."""
    data = recipe.data
    assert isinstance(data, Files)
    if not len(index.validation):  # a run would have to set some of the images aside
        data = data.model_copy(update={"validation": 0.1})
    counted, folder = locate(data, index.folder)
    assert folder is not None
    placement, placed = read_placement(None, ["on.device=cpu", "on.replicas=1"])
    plan = plan_job("show", recipe.model_copy(update={"data": counted}), placement, folder, Tree(), placed).plan
    names = _class_names(counted, folder)
    from paceline.data.inspect.contact_sheet import contact_sheet
    from paceline.data.inspect.samples import draw_samples

    pairs = [(names[sample.image], sample.shown) for sample in draw_samples(plan, folder, _IMAGES)]
    with disk_faults(DataError, sheet, "cannot be written"):
        contact_sheet(pairs, _COLUMNS).save(sheet, "PNG")


def _class_names(data: Data, folder: Path) -> list[str]:
    """The class of every training image."""
    assert isinstance(data, Files)
    index = open_index(data, folder)
    labels = index.training.rows["label"].tolist()
    return [index.classes[label] if 0 <= label < len(index.classes) else "?" for label in labels]
