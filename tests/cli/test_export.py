"""paceline export, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import SMALL, run_in
from paceline.errors import RunError
from paceline.exporting.request import read_request
from trained_run import train_on_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its images."""
    folder = tmp_path_factory.mktemp("export")
    train_on_images(folder)
    return folder


def test_what_was_measured_is_printed(folder: Path) -> None:
    done = run_in(folder, "export", "run", "--to", "safetensors", "--out", "shared")
    assert done.returncode == 0, done.stderr
    for words in ("shared/model.safetensors", "15 of 15 validation images", "ms an image", "shared/README.md"):
        assert words in done.stdout
    done = run_in(folder, "export", "run", "--to", "safetensors", "--out", "shared", "--json")
    measured = json.loads(done.stdout)
    assert (measured["file"], measured["images"], measured["equal"]) == ("shared/model.safetensors", 15, 15)


@pytest.mark.parametrize("out", ["page.txt/x", "/proc/x"])
def test_a_folder_that_cannot_be_written_is_told_before_torch_is_loaded(
    folder: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "page.txt").write_text("")
    with pytest.raises(RunError, match=rf"^{out}: cannot be written: .*; choose another folder with --out$"):
        read_request(folder / "run", "safetensors", Path(out), None, False, [], None)


def test_where_the_data_are_gone_other_images_are_asked_for(folder: Path) -> None:
    (folder / "data").rename(folder / "moved")
    try:
        done = run_in(folder, "export", "run", "--to", "safetensors", "--out", "second")
        assert done.returncode == 2
        assert "are gone" in done.stderr
        assert done.stderr.strip().endswith("or name other images to compare the export on with --images")
        assert not (folder / "second").exists()
        words = ["export", "run", "--to", "safetensors", "--out", "second", "--images", "moved/val/pear"]
        done = run_in(folder, *words)
        assert done.returncode == 0, done.stderr
        assert "5 of 5 images that were named" in done.stdout
    finally:
        (folder / "moved").rename(folder / "data")


def test_a_network_for_images_that_are_drawn_is_exported_too(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert run_in(tmp_path, "train", "small.yaml", "--out", "run", "on.cpu_threads=1").returncode == 0
    done = run_in(tmp_path, "export", "run", "--to", "safetensors")
    assert done.returncode == 0, done.stderr
    assert "37 of 37 validation images" in done.stdout
