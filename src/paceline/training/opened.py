"""A trained network ready to use: opened from its run folder, without training data and without an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline import checkpoint
from paceline.augment.normalize import Normalize
from paceline.augment.resized_crop import evaluation_boxes
from paceline.data.index.fingerprint import trained_classes
from paceline.data.index.image_header import parse_header
from paceline.data.index.table import Flag
from paceline.data.load.decode import decode_into
from paceline.data.load.shapes import CLASSES as SHAPES_CLASSES
from paceline.errors import Damaged, RunError
from paceline.facts import DataFacts
from paceline.model.build import build_network
from paceline.model.network import Network, mirrored_scores
from paceline.model.pretrained import evaluated_weights
from paceline.record import stored_plan
from paceline.settings.data import Center, Files, Shapes
from paceline.settings.recipe import Recipe
from paceline.training.restore import copy_tensors
from paceline.training.selection import Selection, steps_to_evaluate


@dataclass(frozen=True)
class OpenedRun:
    """The network of a run as it was evaluated, and what goes in and comes out of it."""

    folder: Path
    recipe: Recipe
    facts: DataFacts
    step: int
    """The step of its checkpoint."""
    network: Network
    """Takes normalized images and gives a row of class scores for each; in evaluation, on the CPU, in float32."""
    normalize: Normalize
    """Takes 8-bit images [images, channels, side, side] and gives what the network takes."""
    classes: tuple[str, ...]
    """The names of the classes, in the order of the scores."""

    @property
    def side(self) -> int:
        """Height and width of the images that are evaluated, in pixels."""
        return self.facts.evaluation_side or self.facts.side

    def preprocess(self, encoded: bytes) -> NDArray[np.uint8]:
        """The pixels [side, side, channels] of an encoded image, cropped and resized as validation images are; of one
        channel, its luma.

        Raises decode.Undecodable for bytes that are no image.
        """
        if self.facts.channels not in (1, 3):
            raise RunError(f"{self.folder}: takes images of {self.facts.channels} channels, which no image file has")
        data = self.recipe.data
        how = data.evaluation if isinstance(data, Files) else Center(name="center", short=self.side)
        turn = isinstance(data, Files) and data.turns
        width, height, flags = parse_header(encoded)
        shown = (height, width) if turn and flags & Flag.ACROSS else (width, height)
        (box,) = evaluation_boxes(how, self.side, *(np.array([edge], np.int64) for edge in shown))
        pixels = np.empty((self.side, self.side, 3), np.uint8)
        resize = data.resize if isinstance(data, Files) else "bilinear"
        decode_into(encoded, int(flags), width, height, box, False, resize, pixels, turn=turn)
        return pixels if self.facts.channels == 3 else np.array(Image.fromarray(pixels).convert("L"))[:, :, None]

    @torch.inference_mode()
    def scores(self, pixels: NDArray[np.uint8]) -> Tensor:
        """A row of class scores for each of some images [images, side, side, channels]."""
        images = self.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        return mirrored_scores(partial(self.network, batch=None), images, self.recipe.evaluate.flip)


def open_run(folder: Path, which: str | None = None) -> OpenedRun:
    """Open the network of a run: of its newest intact checkpoint, of a step, or of the 'best' one."""
    recipe = stored_plan(folder).recipe
    assert recipe.data is not None, "plan.yaml names the data that were found"
    damaged: list[Damaged] = []
    chosen = checkpoint.first_intact(
        folder / "checkpoints", lambda: steps_to_evaluate(folder, Selection(which)), damaged.append
    )
    if chosen is None:
        raise damaged[0]
    step, files = chosen
    network = build_network(recipe, recipe.data.facts)
    copy_tensors(evaluated_weights(files), network.state_dict(), checkpoint.name_of(step))
    return OpenedRun(
        folder,
        recipe,
        recipe.data.facts,
        step,
        network.eval(),
        Normalize(recipe.data).float(),
        run_classes(folder, recipe),
    )


def run_classes(folder: Path, recipe: Recipe) -> tuple[str, ...]:
    """The names of a run's classes, or their numbers for data whose classes have no names here."""
    assert recipe.data is not None
    if isinstance(recipe.data, Shapes):
        return tuple(SHAPES_CLASSES)
    return trained_classes(folder) or tuple(map(str, range(recipe.data.facts.classes)))
