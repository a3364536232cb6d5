"""Paths in a run: stored absolute, found from anywhere, and found again where all was moved together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from folders_made import put
from paceline.errors import DataError
from paceline.job import make_job, prepare_folder, stored_job
from paceline.record import stored_plan
from paceline.settings.data import Files

WORDS = ["model=resnet8", "data.side=32", "on.device=cpu"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with photos, a file of labels and weights beside each other, and a run that is about to begin."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    project = put(tmp_path / "project", *(f"photos/{number}.jpg" for number in range(8)))
    (project / "labels.csv").write_text(
        "\n".join(f"{number}.jpg,{'cat' if number % 2 else 'dog'}" for number in range(8))
    )
    save_file({"head.bias": np.zeros(2, np.float32)}, project / "weights.safetensors")
    monkeypatch.chdir(project)
    words = ["data.labels=labels.csv", "data.validation=50%", "init.from=weights.safetensors", *WORDS]
    job = make_job("images/resnet18", words, Path("photos"), None, None, None)
    prepare_folder(job, Path("runs/first"))
    return project


def data_of(folder: Path, data: Path | None = None) -> tuple[Files, Path | None]:
    job = stored_job(folder, [], data)
    assert isinstance(job.plan.data, Files)
    return job.plan.data, job.data_folder


def test_a_run_is_opened_from_anywhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, folder = data_of(project / "runs/first")
    assert (data.labels, folder) == (str(project / "labels.csv"), project / "photos")
    assert stored_plan(project / "runs/first").recipe.init.from_ == str(project / "weights.safetensors")


def test_a_run_that_moved_with_its_files_finds_them_again(project: Path, tmp_path: Path) -> None:
    moved = project.rename(tmp_path / "elsewhere")
    data, folder = data_of(moved / "runs/first")
    assert (data.labels, folder) == (str(moved / "labels.csv"), moved / "photos")
    assert stored_plan(moved / "runs/first").recipe.init.from_ == str(moved / "weights.safetensors")


def test_a_run_that_moved_alone_keeps_its_files(project: Path, tmp_path: Path) -> None:
    moved = (project / "runs/first").rename(tmp_path / "first")
    data, folder = data_of(moved)
    assert (data.labels, folder) == (str(project / "labels.csv"), project / "photos")
    (project / "photos").rename(tmp_path / "other")
    with pytest.raises(DataError, match="write --data FOLDER with the new place"):
        data_of(moved)
    assert data_of(moved, tmp_path / "other")[1] == tmp_path / "other"


def test_labels_inside_the_data_folder_move_with_it(project: Path, tmp_path: Path) -> None:
    (project / "labels.csv").rename(project / "photos/labels.csv")
    job = make_job(
        "images/resnet18", ["data.labels=labels.csv", "data.validation=50%", *WORDS], Path("photos"), None, None, None
    )
    prepare_folder(job, tmp_path / "second")
    (project / "photos").rename(tmp_path / "other")
    data, folder = data_of(tmp_path / "second", tmp_path / "other")
    assert (data.labels, folder) == ("labels.csv", tmp_path / "other")
