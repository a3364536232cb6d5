"""Processes with other code, other settings or other images do not train together, and each says why."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import write_small

import paceline
from conftest import environment
from folders_made import picture, put

pytestmark = pytest.mark.long
NAMES = [f"{split}/{animal}/{number}.jpg" for split in ("train", "val") for animal in ("cat", "dog") for number in "12"]


def messages(folder: Path, first: tuple[list[str], Path], second: tuple[list[str], Path]) -> list[str]:
    """What two processes say that are started with their own words and their own folder of the package."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *words, "--device", "cpu", "--out", "run", "on.timeout=60"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment() | launch | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(source)},
        )
        for rank, (words, source) in enumerate((first, second))
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    return said


@pytest.fixture
def source() -> Path:
    """Where the package is."""
    return Path(paceline.__file__).parents[1]


def assert_both_say(said: list[str], what: str) -> None:
    here = platform.node()
    for line, start in zip(said, ("error: ", "error (replica 1): "), strict=True):
        assert line.startswith(f"{start}replica 1 on {here} differs from replica 0 on {here}: {what}"), line
        assert line.count("\n") == 1


def test_other_settings_are_told(tmp_path: Path, source: Path) -> None:
    small = write_small(tmp_path)
    said = messages(tmp_path, ([small, "on.micro_batch=4"], source), ([small, "on.micro_batch=2"], source))
    assert_both_say(said, "on.micro_batch (2 and 4); start every process with the same arguments")


def test_other_code_is_told(tmp_path: Path, source: Path) -> None:
    small, other = write_small(tmp_path), tmp_path / "other"
    shutil.copytree(source / "paceline", other / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "paceline/schedule.py").open("a") as file:
        file.write("\n")
    assert_both_say(messages(tmp_path, ([small], source), ([small], other)), "the code of Paceline (")


def test_other_images_are_told(tmp_path: Path, source: Path) -> None:
    here, there = (put(tmp_path / name, *NAMES, content=picture(size=(40, 40))) for name in ("here", "there"))
    (there / "train/dog/1.jpg").rename(there / "train/dog/3.jpg")
    words = ["images/resnet18", "epochs=1", "global_batch=4", "norm_batch=2", "data.side=32", "--data"]
    said = messages(tmp_path, ([*words, str(here)], source), ([*words, str(there)], source))
    assert_both_say(said, "the index of the images (")
