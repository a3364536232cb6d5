"""A trained network opened from its run folder alone, once its training data are gone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch.nn import functional as F

from conftest import SMALL, make_session
from paceline.data.load.decode import Undecodable
from paceline.errors import RunError
from paceline.job import make_job, prepare_folder
from paceline.record import latest, rows_of
from paceline.training.opened import open_run
from paceline.training.run import train_run
from paceline.training.save import save

pytestmark = pytest.mark.usefixtures("one_thread")

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
                Image.fromarray(image).save(folder / split / name / f"{index}.jpg", quality=90)


@pytest.fixture(scope="module", params=["ema.decay=0.8", "evaluate.flip=true"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was trained, and where its data went."""
    folder = tmp_path_factory.mktemp("photos")
    data, run = folder / "data", folder / "run"
    write_images(data)
    (folder / "page.yaml").write_text(SMALL)
    words = ["data={name: images, side: 16, evaluation: {name: center, short: 18}}", "augment.pad=0", request.param]
    words += ["global_batch=8", "epochs=4", "on.micro_batch=4", "on.cpu_threads=1", "on.device=cpu"]
    job = make_job(str(folder / "page.yaml"), words, data, None, None, None)
    prepare_folder(job, run)
    assert train_run(job, run, Console(file=io.StringIO()), ["train"]) == 0
    data.rename(folder / "elsewhere")
    return run, folder / "elsewhere"


def test_it_scores_images_as_the_last_validation_did(run: tuple[Path, Path]) -> None:
    folder, data = run
    opened = open_run(folder)
    assert opened.classes == CLASSES
    files = sorted((data / "val").rglob("*.jpg"))
    scores = opened.scores(np.stack([opened.preprocess(path.read_bytes()) for path in files]))
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in files])
    row = latest(rows_of(folder), "validation")[-1]
    assert opened.step == row["step"]
    assert float((scores.argmax(1) == labels).double().mean()) == pytest.approx(row["top1"])
    assert float(F.cross_entropy(scores, labels)) == pytest.approx(row["loss"], rel=1e-5)


def test_a_checkpoint_can_be_chosen_and_a_wrong_one_is_refused(run: tuple[Path, Path]) -> None:
    assert open_run(run[0], "best").step in {row["step"] for row in latest(rows_of(run[0]), "validation")}
    with pytest.raises(RunError, match="there is no checkpoint of step '7777'"):
        open_run(run[0], "7777")


def test_what_is_no_image_is_refused(run: tuple[Path, Path]) -> None:
    with pytest.raises(Undecodable):
        open_run(run[0]).preprocess(b"nothing that could be decoded")


def trained_on_generated(folder: Path, *words: str) -> Path:
    """A run folder whose network was never trained, for generated images."""
    (folder / "page.yaml").write_text(SMALL)
    job = make_job(str(folder / "page.yaml"), [*words, "on.device=cpu"], None, None, None, None)
    prepare_folder(job, folder / "run")
    save(make_session(job.plan, folder / "run", "append"))
    return folder / "run"


def encoded(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_network_for_one_channel_is_given_the_luma_of_an_image(tmp_path: Path) -> None:
    opened = open_run(trained_on_generated(tmp_path, "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]"))
    gray = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    pixels = [opened.preprocess(encoded(image)) for image in (gray, np.stack([gray] * 3, 2))]
    assert all(np.array_equal(each, gray[:, :, None]) for each in pixels)
    assert opened.scores(np.stack(pixels)).shape == (2, 10)
    assert opened.scores(pixels[0][None]).shape == (1, 10)
    red = opened.preprocess(encoded(np.full((8, 8, 3), (255, 0, 0), np.uint8)))
    assert set(red.flat) == {76}


def test_a_network_for_channels_that_no_image_file_has_refuses_one(tmp_path: Path) -> None:
    words = ("data.channels=2", "data.mean=[0.5, 0.5]", "data.std=[0.5, 0.5]")
    opened = open_run(trained_on_generated(tmp_path, *words))
    with pytest.raises(RunError, match="takes images of 2 channels, which no image file has"):
        opened.preprocess(encoded(np.zeros((8, 8, 3), np.uint8)))
