"""Predictions on a CUDA device equal a validation there, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.data.index.given import read_given
from paceline.prediction import predict_images
from paceline.training.opened import open_run
from trained_run import predicted_scores, train_on_images, validation_paths, validation_scores

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_on_images(tmp_path_factory.mktemp("photos"), "ema.decay=0.8")


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_predictions_on_cuda_are_a_validation_bit_for_bit(run: tuple[Path, Path], precision: str) -> None:
    words = ("on.device=cuda", f"on.precision={precision}", "on.deterministic=true")
    paths = validation_paths(*run)
    opened = open_run(run[0], None, words, len(paths))
    assert torch.equal(predicted_scores(opened, paths), validation_scores(run[0], *words))


def test_heatmaps_are_drawn_from_a_cuda_device(run: tuple[Path, Path], tmp_path: Path) -> None:
    paths = validation_paths(*run)[:2]
    opened = open_run(run[0], None, ["on.device=cuda"], 2)
    found = list(predict_images(opened, read_given(paths).table, {}, heatmaps=tmp_path))
    assert all(each.heatmap and Path(each.heatmap).is_file() for each in found)
