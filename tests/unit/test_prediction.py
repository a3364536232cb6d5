"""Predictions equal a validation, bit for bit, and pass over what cannot be decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from paceline.data.index.given import read_given
from paceline.errors import DataError, RunError
from paceline.model.grad_cam import grad_cam
from paceline.model.network import Network
from paceline.prediction import NO_ANSWER, TrainedNetwork, predict_images
from paceline.training.opened import open_run
from trained_run import CLASSES, predicted_scores, train_on_images, validation_paths, validation_scores


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_on_images(tmp_path_factory.mktemp("photos"), "ema.decay=0.8", "evaluate.flip=true")


@pytest.mark.parametrize(
    ("words", "batch"), [((), 15), (("on.micro_batch=4",), 15), (("on.micro_batch=2", "on.precision=bf16"), 8)]
)
def test_predictions_are_a_validation_bit_for_bit(run: tuple[Path, Path], words: tuple[str, ...], batch: int) -> None:
    paths = validation_paths(*run)
    opened = open_run(run[0], None, words, len(paths))
    assert opened.plan.evaluation_batch == batch
    assert torch.equal(predicted_scores(opened, paths), validation_scores(run[0], *words))


def test_one_image_alone_gets_the_same_answer_up_to_rounding(run: tuple[Path, Path]) -> None:
    paths = validation_paths(*run)
    alone = torch.cat([predicted_scores(open_run(run[0], None, (), 1), [path]) for path in paths[:3]])
    assert torch.allclose(alone, validation_scores(run[0])[:3], rtol=1e-4, atol=1e-5)


def test_images_that_cannot_be_decoded_are_skipped_with_the_reason(run: tuple[Path, Path], tmp_path: Path) -> None:
    good = validation_paths(*run)[:3]
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    (tmp_path / "cut.jpg").write_bytes(Path(good[0]).read_bytes()[:200])
    paths = [str(tmp_path / "bad.jpg"), good[0], str(tmp_path / "cut.jpg"), *good[1:]]
    skipped: dict[str, str] = {}
    found = list(predict_images(open_run(run[0], None, (), 5), read_given(paths).table, skipped, top=2))
    assert [each.image for each in found] == good
    assert all(len(each.classes) == 2 and set(each.classes) <= set(CLASSES) for each in found)
    assert list(skipped) == [paths[0], paths[2]]
    assert skipped[paths[0]] == "its first bytes are not those of an image"
    only = read_given(paths[:1]).table
    assert list(predict_images(open_run(run[0], None, (), 1), only, skipped)) == []


def test_an_image_whose_scores_are_not_finite_has_no_answer(run: tuple[Path, Path]) -> None:
    paths = validation_paths(*run)[:3]
    opened = open_run(run[0], None, (), 3)
    with torch.no_grad():
        next(opened.whole.module.parameters()).fill_(torch.nan)
    skipped: dict[str, str] = {}
    assert list(predict_images(opened, read_given(paths).table, skipped)) == []
    assert skipped == dict.fromkeys(paths, NO_ANSWER)
    with pytest.raises(DataError, match="scores are not finite"):
        TrainedNetwork(opened).predict(paths[0])


def test_probabilities_are_shares_of_one_and_a_threshold_answers_none(run: tuple[Path, Path]) -> None:
    paths = validation_paths(*run)[:1]
    (found,) = predict_images(open_run(run[0], None, (), 1), read_given(paths).table, {})
    assert sum(found.probabilities) == pytest.approx(1)
    assert list(found.probabilities) == sorted(found.probabilities, reverse=True)
    assert found.answer() == found.answer(found.probabilities[0]) == found.classes[0]
    assert found.answer(1.0) is None


def test_settings_of_torch_are_restored(run: tuple[Path, Path]) -> None:
    torch.set_num_threads(2)
    opened = open_run(run[0], None, ["on.cpu_threads=1"], 1)
    list(predict_images(opened, read_given(validation_paths(*run)[:1]).table, {}))
    assert torch.get_num_threads() == 2


def test_heatmaps_are_pictures_with_a_name_each(run: tuple[Path, Path], tmp_path: Path) -> None:
    paths = validation_paths(*run)[:2]
    twin = tmp_path / "other" / Path(paths[0]).name
    twin.parent.mkdir()
    twin.write_bytes(Path(paths[0]).read_bytes())
    images = read_given([*paths, str(twin)]).table
    found = list(predict_images(open_run(run[0], None, (), 3), images, {}, heatmaps=tmp_path))
    files = [Path(each.heatmap) for each in found if each.heatmap]
    assert len(set(files)) == 3
    pixels = []
    for file in files:
        with Image.open(file) as picture:
            pixels.append(np.array(picture))
    assert pixels[0].shape == (16, 16, 3)
    assert np.array_equal(pixels[0], pixels[2])


def test_a_heatmap_shows_the_pixels_that_speak_for_a_class() -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: Tensor, _batch: None) -> Tensor:
            means = x.mean((2, 3))
            return torch.cat([means, -means], 1)

    class Same(torch.nn.Module):
        def forward(self, x: Tensor, _batch: None) -> Tensor:
            return x * 1

    network = Network()
    network.add_module("body", Same())
    network.add_module("head", Mean())
    images = torch.zeros(2, 1, 8, 8)
    images[:, 0, 5, 2] = 1
    heat = grad_cam(network.eval(), images, torch.tensor([0, 1]))
    assert heat[0].argmax() == 5 * 8 + 2
    assert float(heat[0].sum()) == 1
    assert not heat[1].any()
    with pytest.raises(RunError, match="no block whose picture has more than one pixel"):
        grad_cam(network.cut(["head"])[1], images, torch.tensor([0, 1]))
