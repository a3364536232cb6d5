"""Sums over validation images, by name and in one tensor."""

from __future__ import annotations

import pytest
import torch

from paceline.model.metrics import EvaluationSums, evaluation_sums

CPU = torch.device("cpu")


def test_sums_of_any_shape_travel_in_one_tensor() -> None:
    sums = EvaluationSums.zeros(3, CPU)._replace(loss=torch.tensor(7.5), top1=torch.tensor([2.0, 0.0, 1.0]))
    flat = sums.flat()
    assert flat.tolist() == [7.5, 2, 0, 1, 0, 0]
    twice = sums.unflatten(2 * flat)
    assert [total.shape for total in twice] == [total.shape for total in sums]
    assert (twice.loss.item(), twice.top1.tolist()) == (15, [4, 0, 2])


def test_means_are_over_the_images_that_were_counted() -> None:
    scores = torch.eye(8, dtype=torch.float64)[:4]
    sums = evaluation_sums(scores, torch.tensor([0, 1, 7, 3]), 3)
    assert sums.images == 3
    means = sums.means()
    assert means["images"] == 3
    assert means["top1"] == pytest.approx(2 / 3)
    assert list(means) == ["loss", "top1", "top5", "images"]


def test_sums_over_no_image_are_zeros_of_the_same_shapes() -> None:
    sums = evaluation_sums(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), 4)
    zeros = EvaluationSums.zeros(8, CPU)
    assert [(total.shape, total.dtype) for total in zeros] == [(total.shape, total.dtype) for total in sums]
    assert not zeros.flat().any()
