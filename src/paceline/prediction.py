"""Predicts the classes of images by a trained network, in the batches and the arithmetic of a validation."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from paceline.data.index.image_header import to_rgb
from paceline.data.index.table import Strings, Table
from paceline.data.load.batches import MicroBatch
from paceline.data.load.decode import Undecodable
from paceline.data.load.files import FileLoader
from paceline.data.load.files_nvjpeg import NvjpegLoader
from paceline.data.load.image_files import ImageFiles
from paceline.data.load.quarantine import Quarantine
from paceline.errors import DataError
from paceline.files import disk_faults
from paceline.model.grad_cam import grad_cam
from paceline.model.precision import autocast
from paceline.numpy_types import Int64s
from paceline.progress import Progress, silent
from paceline.training.opened import OpenedRun
from paceline.training.selection import check_top
from paceline.training.session import torch_settings

NO_ANSWER = "the network's scores are not finite, so it has no answer"

ImageLike = str | os.PathLike[str] | Image.Image | NDArray[np.uint8] | Tensor
"""A path, a Pillow image, or 8-bit pixels [rows, columns, 3]."""


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image."""

    image: str
    """Its path, as it was written."""
    classes: tuple[str, ...]
    """The most probable classes, the best first."""
    probabilities: tuple[float, ...]
    """The probability of each."""
    heatmap: str | None = None
    """The file that shows what speaks for the best class, if one was asked for."""

    def answer(self, threshold: float | None = None) -> str | None:
        """The best class; None if it is less probable than the threshold."""
        return None if threshold is not None and self.probabilities[0] < threshold else self.classes[0]


class TrainedNetwork(nn.Module):
    """A trained network as a module: 8-bit images [images, side, side, 3] in, class scores [images, classes] out."""

    def __init__(self, opened: OpenedRun) -> None:
        super().__init__()
        self.classes = opened.classes
        """The names of the classes, in the order of the scores."""
        self.side = opened.side
        """Height and width of the images that it takes, in pixels."""
        self.step = opened.step
        """The step of its checkpoint."""
        self._opened = opened
        self.classifier = opened.classifier()
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """A row of class scores for each image."""
        scores: Tensor = self.classifier(images)
        return scores

    def preprocess(self, image: ImageLike) -> NDArray[np.uint8]:
        """The pixels [side, side, 3] of an image, cropped and resized as validation images are."""
        if isinstance(image, str | os.PathLike):
            with disk_faults(DataError, Path(image), "cannot be read", "name an image file"):
                return self._preprocess(Path(image).read_bytes(), str(image))
        return self._preprocess(_encoded(image, self._opened.files.turns), "image")

    def predict(self, image: ImageLike, top: int = 5) -> Prediction:
        """The most probable classes of an image: a path, a Pillow image, or 8-bit pixels [rows, columns, 3]."""
        check_top(top)
        device = next(self.parameters()).device
        with torch.inference_mode():
            scores = self(torch.from_numpy(self.preprocess(image))[None].to(device))
            best = self._opened.probabilities(scores)[0].topk(min(top, len(self.classes)))
        name = str(image) if isinstance(image, str | os.PathLike) else type(image).__name__
        if not scores.isfinite().all():
            raise DataError(f"{name}: {NO_ANSWER}")
        classes = tuple(self.classes[number] for number in best.indices.tolist())
        return Prediction(name, classes, tuple(best.values.tolist()))

    def _preprocess(self, encoded: bytes, name: str) -> NDArray[np.uint8]:
        try:
            return self._opened.preprocess(encoded)
        except Undecodable as fault:
            raise DataError(f"{name}: {fault}") from None


def _encoded(image: Image.Image | NDArray[np.uint8] | Tensor, turn: bool) -> bytes:
    """An image in memory as a file without loss, which is then prepared like any other."""
    if isinstance(image, Tensor):
        image = image.cpu().numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DataError(
                f"pixels of {image.dtype} {tuple(image.shape)}: expected uint8 [rows, columns, 3] from 0 to 255"
            )
        image = Image.fromarray(image) if image.size else Image.new("RGB", (0, 0))
    if not isinstance(image, Image.Image):
        raise DataError(f"{type(image).__name__}: expected a path, a Pillow image, or 8-bit pixels [rows, columns, 3]")
    if 0 in image.size:
        raise DataError("the image has no pixels; give one of at least 1 x 1")
    upright = ImageOps.exif_transpose(image) if turn else image
    file = io.BytesIO()
    to_rgb(upright).save(file, "PNG", compress_level=0)
    return file.getvalue()


class Skipped(Quarantine):
    """Remembers why images cannot be decoded; however many they are, the others are predicted."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.reasons: dict[str, str] = {}

    def add(self, split: ImageFiles, index: int, reason: str, *_: object) -> None:
        self.reasons[split.table.name(index)] = reason


def predict_images(
    opened: OpenedRun, images: Table, skipped: dict[str, str], top: int = 5, heatmaps: Path | None = None,
    progress: Progress = silent,
) -> Generator[Prediction, None, None]:  # fmt: skip
    """Predict each image of a table, in order; one that cannot be decoded, or whose scores are not finite, goes to
    `skipped` with the reason.

    The run was opened for as many images: its batches are then those of a validation.
    """
    taken = set[Path]()
    with torch_settings(opened.plan.placement):
        for batch, offsets, indices in given_batches(opened, images, skipped):
            scores = opened.scores(batch.images)
            best = opened.probabilities(scores).topk(min(top, len(opened.classes)), 1)
            values, numbers, finite = best.values.tolist(), best.indices.tolist(), scores.isfinite().all(1).tolist()
            names = [images.name(index) for index in indices.tolist()]
            maps = {}
            if heatmaps is not None:
                files = [_free(heatmaps, Path(name).stem, taken) for name in names]
                _draw(opened, batch.images, best.indices[:, 0], offsets, files)
                maps = dict(zip(names, map(str, files), strict=True))
            for offset, name in zip(offsets.tolist(), names, strict=True):
                if not finite[offset]:
                    skipped[name] = NO_ANSWER
                    continue
                classes = tuple(opened.classes[number] for number in numbers[offset])
                yield Prediction(name, classes, tuple(values[offset]), maps.get(name))
            progress("images", int(indices[-1]) + 1 if len(indices) else 0, len(images))


def given_batches(
    opened: OpenedRun, images: Table, skipped: dict[str, str], folder: Path = Path()
) -> Iterator[tuple[MicroBatch, Int64s, Int64s]]:
    """Batches as a validation has them, the places in each that hold an image which could be decoded, and the indices
    of those images; their paths are relative to `folder`."""
    plan, bad = opened.plan, Skipped()
    assert plan.facts.validation_images == len(images), "the run was opened for another number of images"
    kind = NvjpegLoader if plan.placement.decoder == "gpu" else FileLoader
    loader = kind(plan, partial(_splits, images, folder), 0, opened.world.device, bad)
    first = 0
    try:
        with closing(loader.validation()) as batches:
            for batch in batches:
                good = [at for at in range(batch.count) if images.name(first + at) not in bad.reasons]
                yield batch, np.array(good, np.int64), np.array(good, np.int64) + first
                first += batch.count
    except DataError:
        if len(bad.reasons) < len(images):
            raise  # else none could be decoded, and the reasons say why
    finally:
        loader.close()
        skipped.update(bad.reasons)


def _splits(images: Table, folder: Path) -> tuple[ImageFiles, ImageFiles]:
    """No training images, and the given ones where a loader expects those for validation."""
    none = Table(images.rows[:0], Strings.of(()), Strings.of(()), images.objects)
    return ImageFiles(none, folder, "training"), ImageFiles(images, folder, "given")


def _draw(opened: OpenedRun, images: Tensor, classes: Tensor, offsets: Int64s, files: list[Path]) -> None:
    """Write a picture for each image that shows what speaks for its class."""
    with autocast(opened.plan, opened.world.device):
        heat = grad_cam(opened.whole.module.eval(), opened.whole.augment.normalize(images), classes.clone())
    pixels = images.permute(0, 2, 3, 1)[offsets].cpu().numpy()
    for path, image, shown in zip(files, pixels, heat[offsets].cpu().numpy(), strict=True):
        Image.fromarray(_blend(image, shown)).save(path)


def _free(folder: Path, stem: str, taken: set[Path]) -> Path:
    """A path that is not taken yet: images of several folders may share a name."""
    numbered = (folder / f"{stem}{f'-{number}' if number > 1 else ''}.png" for number in itertools.count(1))
    path = next(path for path in numbered if path not in taken)
    taken.add(path)
    return path


def _blend(image: NDArray[np.uint8], heat: NDArray[np.float32]) -> NDArray[np.uint8]:
    """An image under colors from blue (nothing) over green to red (most)."""
    colors = np.stack([heat, 1 - abs(2 * heat - 1), 1 - heat], 2) * 255
    return np.asarray((0.55 * image + 0.45 * colors).round(), np.uint8)
