"""How much each class counts in the loss, by the recipe and the training images alone (no torch)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.data.index.formats import first_few
from paceline.data.index.scan import open_index
from paceline.data.inspect.describe import class_sizes
from paceline.data.load.arrays import open_split
from paceline.data.load.shapes import CLASSES
from paceline.errors import PlanError
from paceline.numpy_types import Int64s
from paceline.planning import Plan
from paceline.settings.data import Files, Made, Shapes
from paceline.settings.suggest import nearest


def class_weights(plan: Plan, folder: Path | None) -> dict[str, float] | None:
    """The weight of each class by name, in the order of their numbers; None where every image counts the same.

    Their mean over the training images is 1, so that a step is as large as without them.
    """
    asked = plan.recipe.loss.class_weights
    if asked == "none" or plan.evaluates:
        return None
    names, images = _class_images(plan, folder)
    total = int(images.sum())
    if isinstance(asked, str):
        there = images > 0
        # A class without images is in no target but by smoothing, and counts as a mean one.
        weights = np.where(there, total / (there.sum() * np.maximum(images, 1)), 1.0)
        return dict(zip(names, weights.tolist(), strict=True))
    unknown = [name for name in asked if name not in names]
    if unknown and not isinstance(plan.data, Made):  # which stands for images whose classes have names
        which = nearest(unknown[0], names) or f"; the classes are {first_few(names)}"
        raise PlanError(f"loss.class_weights: no class is named '{unknown[0]}'{which}")
    weights = np.array([asked.get(name, 1.0) for name in names])
    weights *= total / (images * weights).sum()
    return dict(zip(names, weights.tolist(), strict=True))


def _class_images(plan: Plan, folder: Path | None) -> tuple[tuple[str, ...], Int64s]:
    """The name of each class, or its number where it has none, and its training images."""
    if isinstance(plan.data, Files):
        assert folder is not None, "the files were located"
        index = open_index(plan.data, folder)
        return index.classes, class_sizes(index, index.training)
    split, classes = open_split(plan.recipe, folder, "training"), plan.facts.classes
    times, rest = divmod(split.count, len(split.labels))  # a pool of images repeats
    counts = [np.bincount(labels, minlength=classes) for labels in (split.labels, split.labels[:rest])]
    names = CLASSES if isinstance(plan.data, Shapes) else map(str, range(classes))
    return tuple(names), (times * counts[0] + counts[1]).astype(np.int64)
