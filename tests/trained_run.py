"""A run that was trained on small images in files, for tests of what is done with a trained network."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from conftest import SMALL

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
    from paceline.job import make_job, prepare_folder
    from paceline.training.run import train_run

    data, run = folder / "data", folder / "run"
    write_images(data)
    (folder / "page.yaml").write_text(SMALL)
    settings = ["data={name: images, side: 16, evaluation: {name: center, short: 18}}", "augment.pad=0", *words]
    settings += ["global_batch=8", "norm_batch=2", "epochs=4", "on.micro_batch=4", "on.cpu_threads=1", "on.device=cpu"]
    job = make_job(str(folder / "page.yaml"), settings, data, None, None, None)
    prepare_folder(job, run)
    assert train_run(job, run, Console(file=io.StringIO()), ["train"]) == 0
    return run, data
