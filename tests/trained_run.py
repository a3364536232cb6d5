"""A run that was trained on small images in files, for tests of what is done with a trained network."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from conftest import SMALL
from paceline import checkpoint
from paceline.data.index.given import read_given
from paceline.data.index.scan import open_index
from paceline.job import make_job, prepare_folder, stored_job
from paceline.prediction import given_batches
from paceline.settings.data import Files
from paceline.training.opened import OpenedRun
from paceline.training.restore import load_checkpoint
from paceline.training.run import train_run
from paceline.training.session import Session, open_session, torch_settings

CLASSES = ("apple", "pear", "plum")


def write_images(folder: Path) -> None:
    """Images of three kinds, of many sizes, for training and validation."""
    pixels = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for number, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                size = (20 + 3 * index, 30 - index, 3)
                image = pixels.integers(60 * number, 60 * number + 120, size, dtype=np.uint8)
                Image.fromarray(image).save(folder / split / name / f"{name}{index}.jpg", quality=90)


def train_on_images(folder: Path, *words: str) -> tuple[Path, Path]:
    """Write images and train on them; gives the run folder and the folder of the images."""
    data, run = folder / "data", folder / "run"
    write_images(data)
    (folder / "page.yaml").write_text(SMALL)
    settings = ["data={name: images, side: 16, evaluation: {name: center, short: 18}}", "augment.pad=0"]
    settings += ["global_batch=8", "norm_batch=2", "epochs=4", "on.micro_batch=4", "on.cpu_threads=1", "on.device=cpu"]
    settings += words
    job = make_job(str(folder / "page.yaml"), settings, data, None, None, None)
    prepare_folder(job, run)
    assert train_run(job, run, Console(file=io.StringIO()), ["train"]) == 0
    return run, data


@contextmanager
def validating(run: Path, *words: str) -> Iterator[Session]:
    """A session with the weights that a validation of the newest checkpoint evaluates."""
    job = stored_job(run, ["on.replicas=auto", "on.micro_batch=auto", *words], None)
    with open_session(job.plan, run, "read", data_folder=job.data_folder) as session:
        step = checkpoint.saved_steps(run / "checkpoints")[-1]
        load_checkpoint(session, step, checkpoint.read(run / "checkpoints" / checkpoint.name_of(step)))
        ema = session.state.ema
        with ema.swapped_in() if ema else nullcontext():
            yield session


def validation_scores(run: Path, *words: str) -> Tensor:
    """The scores of all validation images, as a validation computes them."""
    scores = []
    with validating(run, *words) as session, closing(session.loader.validation()) as batches:
        for batch in batches:
            network = session.state.network
            scores.append(network.scores(batch.images)[: batch.count])
    return torch.cat(scores)


def validation_paths(run: Path, data: Path) -> list[str]:
    """The paths of the validation images, in the order of the index."""
    settings = stored_job(run, [], None).plan.data
    assert isinstance(settings, Files)
    table = open_index(settings, data).validation
    return [str(data / table.name(index)) for index in range(len(table))]


def predicted_scores(opened: OpenedRun, paths: list[str]) -> Tensor:
    """The scores of images in files, as a prediction computes them."""
    batches = given_batches(opened, read_given(paths).table, {})
    with torch_settings(opened.plan.placement):
        return torch.cat([opened.scores(batch.images)[offsets] for batch, offsets, _ in batches])
