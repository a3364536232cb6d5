"""A trained network ready to use: opened from its run folder, without training data and without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import checkpoint
from paceline.augment.normalize import Normalize
from paceline.augment.resized_crop import evaluation_boxes
from paceline.data.index.fingerprint import trained_classes
from paceline.data.index.image_header import parse_header
from paceline.data.index.table import Flag
from paceline.data.load.decode import decode_into
from paceline.data.load.shapes import CLASSES as SHAPES_CLASSES
from paceline.errors import Damaged
from paceline.evaluating import network_job
from paceline.model.network import Network, mirrored_scores
from paceline.model.pretrained import evaluated_weights
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.record import stored_plan
from paceline.settings.data import Data, Files, Shapes
from paceline.training.restore import copy_tensors
from paceline.training.selection import Selection, steps_to_evaluate
from paceline.world import World, init_world

REFERENCE = (
    "on.device=cpu", "on.precision=fp32", "on.weights=auto", "on.kernels=plain", "on.compile=false", "on.decoder=auto",
    "on.recompute=[]",
)  # fmt: skip
"""The placement of a network in float32 on the CPU, as every machine has it."""


@dataclass(frozen=True)
class OpenedRun:
    """The network of a run as it is evaluated, and what goes in and comes out of it."""

    folder: Path
    plan: Plan
    """Its data are images in files, whatever it was trained on."""
    world: World
    step: int
    """The step of its checkpoint."""
    whole: Whole
    """The network on its device, with the weights that validation evaluates."""
    classes: tuple[str, ...]
    """The names of the classes, in the order of the scores."""

    @property
    def side(self) -> int:
        """Height and width of the images that are evaluated, in pixels."""
        return self.plan.facts.evaluation_side or self.plan.facts.side

    @property
    def files(self) -> Files:
        """How images in files are evaluated."""
        assert isinstance(self.plan.data, Files)
        return self.plan.data

    def preprocess(self, encoded: bytes) -> NDArray[np.uint8]:
        """The pixels [side, side, 3] of an encoded image, cropped and resized as validation images are.

        Raises decode.Undecodable for bytes that are no image.
        """
        data = self.files
        width, height, flags = parse_header(encoded)
        shown = (height, width) if data.turns and flags & Flag.ACROSS else (width, height)
        (box,) = evaluation_boxes(data.evaluation, self.side, *(np.array([edge], np.int64) for edge in shown))
        pixels = np.empty((self.side, self.side, 3), np.uint8)
        decode_into(encoded, int(flags), width, height, box, False, data.resize, pixels, turn=data.turns)
        return pixels

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """A row of class scores for each of some 8-bit images [images, 3, side, side] on the device, as a validation
        computes them."""
        return self.whole.scores(images)

    def probabilities(self, scores: Tensor) -> Tensor:
        """What the scores say of each class: shares of one, or of a network trained with a binary loss one by one."""
        return scores.sigmoid() if self.plan.recipe.loss.kind == "binary" else scores.softmax(1)

    def classifier(self) -> Classifier:
        """The network and what stands around it as one module, which shares the weights."""
        return Classifier(self.whole.module.eval(), self.whole.augment.normalize, self.plan.recipe.evaluate.flip)


class Classifier(nn.Module):
    """8-bit images [images, side, side, 3] in, class scores [images, classes] out."""

    def __init__(self, network: Network, normalize: Normalize, flip: bool) -> None:
        super().__init__()
        self.network, self.normalize, self.flip = network, normalize, flip

    def forward(self, images: Tensor) -> Tensor:
        """A row of class scores for each image."""
        pixels = self.normalize(images.permute(0, 3, 1, 2)).to(next(self.network.parameters()).dtype)
        return mirrored_scores(partial(self.network, batch=None), pixels, self.flip).to(self.normalize.mean.dtype)


def open_run(folder: Path, which: str | None = None, words: Sequence[str] = (), images: int | None = None) -> OpenedRun:
    """Open the network of a run: of its newest intact checkpoint, of a step, or of the 'best' one; on.* words place it,
    and `images` is how many it will see."""
    plan = network_job(folder, list(words), images).plan
    world = init_world(plan, None)
    whole = Whole(plan, world)
    step = load_evaluated(folder, which, whole.module.state_dict())
    return OpenedRun(folder, plan, world, step, whole, run_classes(folder, stored_plan(folder).recipe.data))


def load_evaluated(folder: Path, which: str | None, tensors: Mapping[str, Tensor]) -> int:
    """Copy the weights that a run is evaluated by into a network's tensors; gives the step of its checkpoint."""
    damaged: list[Damaged] = []
    chosen = checkpoint.first_intact(
        folder / "checkpoints", lambda: steps_to_evaluate(folder, Selection(which)), damaged.append
    )
    if chosen is None:
        raise damaged[0]
    step, files = chosen
    copy_tensors(evaluated_weights(files), dict(tensors), checkpoint.name_of(step))
    return step


def run_classes(folder: Path, data: Data | None) -> tuple[str, ...]:
    """The names of a run's classes, or their numbers for data whose classes have no names here."""
    assert data is not None
    if isinstance(data, Shapes):
        return tuple(SHAPES_CLASSES)
    return trained_classes(folder) or tuple(map(str, range(data.facts.classes)))
