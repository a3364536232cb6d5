"""A trained network opened from its run folder alone, once its training data are gone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from conftest import SMALL, make_session
from paceline.data.load.decode import Undecodable
from paceline.errors import RunError, SpecError
from paceline.job import make_job, prepare_folder
from paceline.record import latest, rows_of
from paceline.training.opened import REFERENCE, open_run
from paceline.training.save import finish_saving, save
from trained_run import CLASSES, train_on_images


@pytest.fixture(scope="module", params=["ema.decay=0.8", "evaluate.flip=true"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was trained, and where its data went."""
    folder = tmp_path_factory.mktemp("photos")
    run, data = train_on_images(folder, request.param)
    data.rename(folder / "elsewhere")
    return run, folder / "elsewhere"


def test_it_scores_images_as_the_last_validation_did(run: tuple[Path, Path]) -> None:
    folder, data = run
    opened = open_run(folder)
    assert opened.classes == CLASSES
    files = sorted((data / "val").rglob("*.jpg"))
    pixels = torch.from_numpy(np.stack([opened.preprocess(path.read_bytes()) for path in files]))
    scores = opened.scores(pixels.permute(0, 3, 1, 2))
    assert torch.equal(scores, opened.classifier()(pixels))
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
    session = make_session(job.plan, folder / "run", "append")
    save(session)
    finish_saving(session)
    return folder / "run"


def test_a_network_for_images_of_one_size_takes_image_files_of_any(tmp_path: Path) -> None:
    opened = open_run(trained_on_generated(tmp_path))
    small = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(opened.preprocess(encoded(small)), small)
    assert opened.preprocess(encoded(small.repeat(3, 0).repeat(2, 1))).shape == (8, 8, 3)


def test_a_network_for_channels_that_no_image_file_has_is_refused(tmp_path: Path) -> None:
    run = trained_on_generated(tmp_path, "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]")
    with pytest.raises(RunError, match="takes images of 1 channels, and those in files have 3"):
        open_run(run)


def test_a_placement_that_only_training_has_use_for_is_no_hindrance(tmp_path: Path) -> None:
    run = trained_on_generated(tmp_path, "on.data_on_device=true", "on.recompute=all")
    assert open_run(run, words=REFERENCE).plan.placement.data_on_device is False
    assert open_run(run).classes == tuple(map(str, range(10)))


def test_only_the_placement_of_a_run_may_change(tmp_path: Path) -> None:
    run = trained_on_generated(tmp_path)
    assert open_run(run, words=["on.precision=fp64"]).whole.dtype == torch.float64
    with pytest.raises(SpecError, match="'epochs=3': a run keeps its recipe"):
        open_run(run, words=["epochs=3"])
    with pytest.raises(SpecError, match="'runs/other' is one word too many: name one run"):
        open_run(run, words=["runs/other"])


def encoded(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
