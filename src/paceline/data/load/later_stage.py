"""The loader of a pipeline's later stages, which know everything of a micro-batch but its images and labels."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import closing

import torch

from paceline.data.load.batches import HostInputs, MicroBatch, StepBatches, ahead, fill_up, host_inputs
from paceline.data.load.order import evaluation_images, micro_batch_positions
from paceline.device import to_device
from paceline.planning import Plan


class LaterStageLoader:
    """Gives micro-batches without images, in step with the loader of the first stage, which decodes them.

    What is drawn for images follows from their positions; labels come from the first stage, because an image that
    cannot be decoded gives place to another one.
    """

    def __init__(self, plan: Plan, replica: int, device: torch.device) -> None:
        self._plan, self._replica, self._device = plan, replica, device
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)

    def training(self, start: int) -> StepBatches:
        """The positions and numbers of each micro-batch."""

        def prepare(step: int) -> list[HostInputs]:
            return host_inputs(self._plan, micro_batch_positions(self._plan, step, self._replica), self._device)

        with closing(ahead(map(prepare, itertools.count(start)))) as steps:
            for step in steps:
                yield [inputs.batch(self._nothing, self._nothing) for inputs in step]

    def validation(self) -> Generator[MicroBatch, None, None]:
        """The numbers of the images of each batch."""
        for indices in evaluation_images(self._plan, self._replica):
            filled = to_device(fill_up(indices, self._plan.evaluation_batch), self._device)
            yield MicroBatch(self._nothing, self._nothing, len(indices), indices=filled)

    def validation_name(self, index: int) -> str:
        """The number of an image, whose name the first stage knows."""
        return str(index)
