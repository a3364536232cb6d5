"""Opens the loader that suits a plan: images in memory or in files, prepared by the host or by the device."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from paceline.data.load.arrays import open_source
from paceline.data.load.batches import MicroBatch, StepBatches
from paceline.data.load.files import FileLoader, Share
from paceline.data.load.files_nvjpeg import NvjpegLoader
from paceline.data.load.image_files import open_splits
from paceline.data.load.in_memory import HostLoader, OnDeviceLoader, SyntheticLoader
from paceline.data.load.quarantine import Quarantine
from paceline.planning import Plan
from paceline.settings.data import Files


class Loader(Protocol):
    """Where a replica gets its images."""

    def training(self, start: int) -> StepBatches:
        """This replica's micro-batches of each step, beginning with step `start`, without end."""

    def validation(self) -> Generator[MicroBatch, None, None]:
        """This replica's part of the validation images, each once; the last batch says how many of its are real."""

    def validation_name(self, index: int) -> str:
        """Where a person finds a validation image: its path, or its number."""


def open_loader(
    plan: Plan,
    folder: Path | None,
    replica: int,
    device: torch.device,
    run: Path | None = None,
    share: Share | None = None,
) -> Loader:
    """The loader for a data set and a placement; images that cannot be decoded are listed in the folder `run`, and
    `share` gives the replicas of a host one cache."""
    if isinstance(plan.data, Files):
        assert folder is not None
        bad = Quarantine.of(run, plan.data.bad_allowed(plan.facts.images + plan.facts.validation_images))
        kind = NvjpegLoader if plan.placement.decoder == "gpu" else FileLoader
        return kind(plan, partial(open_splits, plan, plan.data, folder), replica, device, bad, share)
    source = open_source(plan, folder)
    if plan.data.name == "synthetic":
        return SyntheticLoader(plan, source, replica, device)
    complete = all(split.count == len(split.images) for split in (source.training, source.validation))
    in_memory = OnDeviceLoader if plan.placement.data_on_device and complete else HostLoader
    return in_memory(plan, source, replica, device)
