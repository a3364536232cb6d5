"""One shipped recipe of each family takes two whole steps on a CUDA device: its own batch, image side and precision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.record import rows_of

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RECIPES = [
    "nvcnn/alexnet",
    "nvcnn/vgg16",
    "nvcnn/googlenet",
    "nvcnn/inception-v3",
    "nvcnn/inception-v4",
    "nvcnn/inception-resnet-v2",
    "habana/resnet50",
    "nvcnn/resnext50",
    "graphcore/efficientnet-b0-256",
    "graphcore/mobilenet-v3-large",
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_two_whole_steps_on_synthetic_images(name: str, tmp_path: Path) -> None:
    words = ["data=synthetic", "epochs=2 steps", "evaluate.every=never", "report=1 steps"]
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        name,
        *words,
        "on.device=cuda",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    reports = [row for row in rows if row["kind"] == "report"]
    assert reports[-1]["step"] == 2
    assert all(0 < row["loss"] < 100 and not row["bad_steps"] for row in reports)
