"""paceline data show: what a data set is, and a contact sheet of what augmentation makes of it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.command.data_pack import existing, print_any_name, progress, settings
from paceline.command.tables import show_facts, show_rows
from paceline.data.index import locate as places
from paceline.data.index.table import Index
from paceline.data.load.order import training_order
from paceline.data.pack.writer import open_source
from paceline.errors import DataError, SpecError
from paceline.job import plan_job, read_placement, read_recipe
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe

Picture = NDArray[np.uint8]

_PAGE = (
    "{model: resnet8, global_batch: 16, epochs: 90, optimizer: {name: sgd, lr: 0.1}, schedule: constant, "
    "augment: {flip: true}}"
)
"""What a sheet shows without a recipe: the usual crop and flip."""
_MANY = 12
"""Classes that are all listed; of more, the first and the last few."""
_COLUMNS, _IMAGES, _GAP = 8, 16, 4


def run(source: Path, words: list[str], sheet: Path | None, as_json: bool) -> None:
    """Print what a data set is; with a sheet, write what the loader delivers of it."""
    print_any_name()
    recipe = _read(words)
    assert isinstance(recipe.data, Files)
    if sheet is not None and sheet.suffix.lower() != ".png":
        raise SpecError(f"--sheet {sheet}: a contact sheet is a PNG file; write --sheet {sheet.with_suffix('.png')}")
    with progress() as tell:
        index = open_source(recipe.data, existing(source), tell)
    from paceline.data.inspect.check import survey

    facts = survey(index)
    if sheet is not None:
        facts["sheet"] = str(sheet)
        _write_sheet(recipe, index, sheet)
    if as_json:
        print(json.dumps({**facts, "images of each class": _classes(index)}, indent=1))
        return
    show_facts(_lines(facts), as_json=False)
    print()
    show_rows(_some(_classes(index)), as_json=False)


def _read(words: list[str]) -> Recipe:
    """The recipe that the words name and change; without a name, they are settings of the data."""
    if words and "=" not in words[0]:
        recipe, _ = read_recipe(words[0], words[1:])
        data = recipe.data or Files(name="images")
        if not isinstance(data, Files):
            raise SpecError(f"{words[0]} trains on {data.name}, which is not in files; write data=images after it")
        return recipe.model_copy(update={"data": data})
    page = build(Recipe, parse(_PAGE, "show"))
    return page.model_copy(update={"data": settings(words)})


def _classes(index: Index) -> list[dict[str, Any]]:
    from paceline.data.inspect.check import images_of

    counts = [images_of(index, table).tolist() for table in (index.training, index.validation)]
    return [
        {"class": name, "training images": trained, "validation images": judged}
        for name, trained, judged in zip(index.classes, *counts, strict=True)
    ]


def _some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, or the first and the last of many."""
    if len(rows) <= _MANY:
        return rows
    left_out = {**dict.fromkeys(rows[0], "..."), "class": f"... {len(rows) - _MANY + 2:,} more"}
    return [*rows[: _MANY // 2 - 1], left_out, *rows[1 - _MANY // 2 :]]


def _lines(facts: dict[str, Any]) -> dict[str, Any]:
    """The same for people: nothing that is zero, and sizes in a line."""
    said: dict[str, Any] = {}
    for name, value in facts.items():
        match name, value:
            case "width" | "height", dict():
                said[name] = f"{value['smallest']:,} to {value['largest']:,} pixels, median {value['median']:,}"
            case "encodings", dict():
                said |= {kind: count for kind, count in value.items() if count}
            case "notes", list():
                said |= {f"note {place}": note for place, note in enumerate(value, start=1)}
            case "turned by EXIF" | "with objects" | "labels outside the classes", 0:
                continue
            case _:
                said[name] = value
    return said


def _write_sheet(recipe: Recipe, index: Index, sheet: Path) -> None:
    """Rows of training images: each at two of its positions of the endless list, one below the other."""
    from PIL import Image

    data = recipe.data
    assert isinstance(data, Files)
    if not len(index.validation):  # a run would have to put some of the images aside
        data = data.model_copy(update={"validation": 0.1})
    found, folder = places.locate(data, index.folder)
    assert folder is not None
    placement, placed = read_placement(None, ["on.device=cpu", "on.replicas=1"])
    plan = plan_job("show", recipe.model_copy(update={"data": found}), placement, folder, Tree(), placed).plan
    shown = _shown_positions(plan)
    side, rows = plan.facts.side + _GAP, 2 * -(-len(shown) // _COLUMNS)
    grid = np.full((rows * side + _GAP, _COLUMNS * side + _GAP, 3), 255, np.uint8)
    for place, pair in enumerate(shown):
        for below, position in enumerate(pair):
            picture = picture_at(plan, folder, position)
            top = (place // _COLUMNS * 2 + below) * side + _GAP
            left = place % _COLUMNS * side + _GAP
            grid[top : top + len(picture), left : left + len(picture)] = picture
    try:
        Image.fromarray(grid).save(sheet, "PNG")
    except OSError as fault:
        raise DataError(f"{sheet}: cannot be written: {fault.strerror or fault}") from None


def _shown_positions(plan: Plan) -> list[tuple[int, int]]:
    """The first positions of the endless list, and where the same images stand in a later epoch."""
    order, length = training_order(plan), plan.epoch_images
    firsts = np.arange(min(_IMAGES, length), dtype=np.int64)
    later: dict[int, int] = {}
    epoch = 1
    images = order.images(firsts).tolist()
    while len(later) < len(images):  # where tails are dropped, an image may be missing from an epoch
        positions = np.arange(epoch * length, (epoch + 1) * length, dtype=np.int64)
        numbers = order.images(positions)
        for place in np.flatnonzero(np.isin(numbers, images)).tolist():
            later.setdefault(int(numbers[place]), int(positions[place]))
        epoch += 1
    return [(int(first), later[image]) for first, image in zip(firsts, images, strict=True)]


def picture_at(plan: Plan, folder: Path, position: int) -> Picture:
    """The training picture at a position of the endless list as the network sees it, before it is normalized."""
    import torch

    from paceline.augment.pipeline import Augmentation
    from paceline.data.load.files import FileLoader
    from paceline.data.load.image_files import open_splits
    from paceline.data.load.quarantine import Quarantine

    assert isinstance(plan.data, Files)
    # The layout that gives one replica exactly this image: whatever the layout, the image is the same.
    layout = {"micro_batch": 1, "replicas": plan.global_batch, "decoded_validation": False, "loader_workers": 1}
    data = plan.data.model_copy(update={"normalize": "mean"})
    recipe = plan.recipe.model_copy(update={"data": data})
    plan = replace(plan, recipe=recipe, placement=plan.placement.model_copy(update=layout))
    device = torch.device("cpu")
    step, replica = divmod(position, plan.global_batch)
    loader = FileLoader(
        plan, partial(open_splits, plan, data, folder), replica, device, Quarantine(None, most=plan.facts.images)
    )
    with closing(loader), closing(loader.training(step)) as shares:
        (batch,) = next(shares)
    augment = Augmentation(plan, device)
    assert batch.draws is not None
    seen, *_ = augment(augment.prepare(batch.images, batch.draws), batch.labels, batch.draws)
    colors = seen[0] + torch.tensor(data.mean).view(-1, 1, 1) * 255
    made: Picture = colors.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return made
