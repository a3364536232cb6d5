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

MICRO_BATCHES = {
    "nvcnn/alexnet": 64,
    "nvcnn/vgg16": 64,
    "nvcnn/googlenet": 64,
    "nvcnn/inception-v3": 64,
    "nvcnn/inception-v4": 64,
    "nvcnn/inception-resnet-v2": 64,
    "habana/resnet50": 256,
    "nvcnn/resnext50": 64,
    "graphcore/efficientnet-b0-256": 128,
    "graphcore/mobilenet-v3-large": 256,
}


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_a_recipe_takes_two_whole_steps_on_synthetic_images(name: str, tmp_path: Path) -> None:
    words = ["data=synthetic", "epochs=2 steps", "evaluate.every=never", "report=1 steps"]
    # cuDNN tries convolutions in all the memory that it can have, which the tests beside this one need, too.
    placed = ["on.device=cuda", f"on.micro_batch={MICRO_BATCHES[name]}", "on.memory=20 GiB"]
    command = [sys.executable, "-m", "paceline", "train", name, *words, *placed, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    reports = [row for row in rows if row["kind"] == "report"]
    assert reports[-1]["step"] == 2
    assert all(0 < row["loss"] < 100 and not row["bad_steps"] for row in reports)
