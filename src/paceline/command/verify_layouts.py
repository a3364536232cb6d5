"""What `paceline verify` tries: a recipe made small, and layouts of every kind that it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.layouts import fits, mixes
from paceline.model import tables
from paceline.settings.augment import Augment
from paceline.settings.data import Center, Files, Made
from paceline.settings.model import External
from paceline.settings.recipe import BatchNorm, Recipe

MOST_REPLICAS = 5
"""More than these no layout has."""


@dataclass(frozen=True)
class Layout:
    """One way to cut a step."""

    label: str
    replicas: int
    micro_batch: int
    recompute: tuple[str, ...] = ()
    shard: str = "none"
    offload: str = "none"
    stages: int = 1
    virtual_stages: int = 1
    pipeline: str = "grouped"


def shrink(recipe: Recipe, above: int = 128) -> tuple[Recipe, list[str]]:
    """The smallest recipe with as many norm groups a step (at most two), where it is large; and what changed.

    A global batch is large if it is above that many images.
    """
    changes: dict[str, Any] = {}
    notes = []
    if recipe.global_batch > above:
        norm = recipe.norm_batch or recipe.global_batch
        # Near 16: smaller groups would measure rounding, larger ones only take longer.
        block = recipe.mix.block if recipe.mix.active and norm % recipe.mix.block == 0 else 1
        # Without norm groups the blocks of mixing are what a step is cut between: four of them, for enough layouts.
        least = min(max(8, block if isinstance(recipe.norm, BatchNorm) else 4 * block), norm)
        near = min((d for d in range(least, norm + 1) if norm % d == 0 and d % block == 0), key=lambda d: abs(d - 16))
        batch = near if norm == recipe.global_batch else 2 * near
        changes |= {"global_batch": batch, "norm_batch": near}
        notes.append(f"global_batch {recipe.global_batch} -> {batch}, norm_batch {norm} -> {near}")
    small = max(32, tables.smallest_side(recipe.model))
    if isinstance(recipe.data, Made | Files) and recipe.data.side > small:
        other = {"name": "generated"} if isinstance(recipe.data, Made) else _smaller_evaluation(recipe.data, small)
        changes["data"] = recipe.data.model_copy(update={"side": small, "evaluation_side": None, **other})
        notes.append(f"image side {recipe.data.side} -> {small}")
        changes["augment"] = _shrunk(recipe.augment, small / recipe.data.side, tables.smallest_side(recipe.model))
    return recipe.model_copy(update=changes), notes


def _smaller_evaluation(data: Files, side: int) -> dict[str, Any]:
    """What is given in pixels of how validation images in files are evaluated."""
    how = data.evaluation
    if isinstance(how, Center) and how.short:
        how = Center(name="center", short=max(side, how.short * side // data.side))
    return {"evaluation": how}


def _shrunk(augment: Augment, share: float, least: int) -> Augment:
    """The same for what is given in pixels."""
    sides = {when: max(least, math.ceil(side * share)) for when, side in augment.side.items()}
    return augment.model_copy(update={"side": sides, "cutout": math.ceil(augment.cutout * share)})


def choose_layouts(recipe: Recipe) -> list[Layout]:
    """Layouts of every kind the recipe allows: whole, accumulated, ghost norm, 2 and 3 replicas, shares of the
    optimizer's state, recomputation, distributed norm, pipelines."""
    G = recipe.global_batch  # noqa: N806 - the design's letter
    n = (recipe.norm_batch or G) if isinstance(recipe.norm, BatchNorm) else None
    piece = n if n is not None and n < G else G // 4 if n is None else G
    wanted = [
        Layout("whole", 1, G),
        Layout("accumulated", 1, piece),
        Layout("ghost norm, accumulated" if n else "accumulated in halves", 1, 2 * piece),
        Layout("2 replicas", 2, piece),
        Layout("3 replicas", 3, piece),
        Layout("2 replicas, shares on host", 2, piece, shard="optimizer", offload="optimizer"),
        Layout("recomputed", 1, piece, ("all",)),
    ]
    if n is not None:
        wanted += [Layout(f"distributed norm over {q}", q, n // q) for q in (2, 3, 4, 5) if n % q == 0]
        wanted += [Layout("distributed norm, 2 of 4", 4, n // 2)] if n % 2 == 0 else []
    else:
        wanted += [Layout(f"{R} replicas", R, m) for R, m in ((4, G // 4), (2, G // 2), (5, G // 5), (2, 1), (3, 1))]
    if not isinstance(recipe.model, External) and not recipe.freeze:
        half = piece // 2 if n is not None and n % 2 == 0 else piece
        wanted += [
            Layout("2 stages of 2 parts", 1, piece, stages=2, virtual_stages=2, pipeline=_order(G, 2 * piece)),
            Layout("2 x 2 stages, in shares", 2, half, shard="optimizer", stages=2, pipeline=_order(G, 4 * half)),
        ]
    able: dict[tuple[Any, ...], Layout] = {}
    for layout in wanted:
        m = layout.micro_batch
        if 0 < m <= G and fits(G, n, layout.replicas, m) and mixes(recipe, m):
            able.setdefault((layout.replicas, m, layout.recompute, layout.shard, layout.stages), layout)
    return list(able.values())


def _order(global_batch: int, images: int) -> str:
    """The order of passes that keeps fewer activations, where a step has whole rounds of so many images."""
    return "interleaved" if images and global_batch % images == 0 else "grouped"
