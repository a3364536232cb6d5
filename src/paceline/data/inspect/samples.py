"""Draws training images as the network sees them: what augmentation makes of them at places of the endless list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.augment.pipeline import Augmentation, Draws
from paceline.data.load.arrays import Source, open_source
from paceline.data.load.files import FileLoader
from paceline.data.load.image_files import open_splits
from paceline.data.load.in_memory import HostLoader
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import Quarantine
from paceline.numpy_types import UInt8s
from paceline.planning import Plan
from paceline.settings.data import Files


class SeenImage(NamedTuple):
    """A training image: its index, its label, and what the network sees of it the first time and in a later epoch."""

    image: int
    label: int
    shown: list[UInt8s]


def draw_samples(plan: Plan, folder: Path | None, count: int) -> Iterator[SeenImage]:
    """The first images of the endless list."""
    source = None if isinstance(plan.data, Files) else open_source(plan, folder)
    for image, *positions in position_pairs(plan, count):
        labels, shown = zip(*(_seen_at(plan, folder, source, position) for position in positions), strict=True)
        yield SeenImage(image, labels[0], list(shown))


def position_pairs(plan: Plan, count: int) -> list[tuple[int, int, int]]:
    """The first images of the endless list, each with its position there and one in a later epoch."""
    order, length = training_order(plan), plan.epoch_images
    firsts = np.arange(min(count, length), dtype=np.int64)
    later: dict[int, int] = {}
    epoch = 1
    images = order.images(firsts).tolist()
    while len(later) < len(images):  # where tails are dropped, an image may be missing from an epoch
        positions = np.arange(epoch * length, (epoch + 1) * length, dtype=np.int64)
        epoch_images = order.images(positions)
        for index in np.flatnonzero(np.isin(epoch_images, images)).tolist():
            later.setdefault(int(epoch_images[index]), int(positions[index]))
        epoch += 1
    return [(image, int(first), later[image]) for first, image in zip(firsts, images, strict=True)]


def _seen_at(plan: Plan, folder: Path | None, source: Source | None, position: int) -> tuple[int, UInt8s]:
    """The label and the pixels of the training image at a position of the endless list as the network
    sees it, before mixing and normalization."""
    # The layout that gives one replica exactly this image: whatever the layout, the image is the same.
    layout = {"micro_batch": 1, "replicas": plan.global_batch, "decoded_validation": False, "loader_workers": 1}
    plan = replace(plan, placement=plan.placement.model_copy(update=layout))
    device = torch.device("cpu")
    step, replica = divmod(position, plan.global_batch)
    if source is not None:
        loader = HostLoader(plan, source, replica, device)
        with closing(loader.training(step)) as shares:
            (batch,) = next(shares)
    else:
        assert isinstance(plan.data, Files)
        assert folder is not None
        files = FileLoader(
            plan,
            partial(open_splits, plan, plan.data, folder),
            replica,
            device,
            Quarantine(None, most=plan.facts.images),
        )
        with closing(files), closing(files.training(step)) as shares:
            (batch,) = next(shares)
    assert batch.draws is not None
    (pixels,) = pixels_seen(plan, batch.images, batch.draws)
    return int(batch.labels[0]), pixels


def pixels_seen(plan: Plan, images: Tensor, draws: Draws) -> list[UInt8s]:
    """What the network sees of 8-bit training images on the host, before mixing, as pixels again."""
    data = plan.data.model_copy(update={"normalize": "mean"})
    augment = Augmentation(replace(plan, recipe=plan.recipe.model_copy(update={"data": data})), images.device)
    colors = augment.unmixed(augment.prepare(images, draws), draws) + torch.tensor(data.mean).view(-1, 1, 1) * 255
    return list(colors.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())
