"""Losses against their formulas: smoothing, shared targets, and a binary one for each class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import keyed
from paceline.model.loss import make_loss
from paceline.settings.recipe import Loss

CLASSES = 5
IMAGES = 7


def numbers(name: str, *shape: int) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.from_numpy(keyed.normals(keyed.key(0, name), count)).view(shape)


def dense(labels: Tensor, weights: Tensor) -> Tensor:
    target = torch.zeros(len(labels), CLASSES, dtype=torch.float64)
    for i, (row, shares) in enumerate(zip(labels.tolist(), weights.tolist(), strict=True)):
        for label, share in zip(row, shares, strict=True):
            target[i, label] += share
    return target


SCORES = numbers("scores", IMAGES, CLASSES) * 2
LABELS = torch.tensor(
    [[0, 1, 2, 3], [1, 1, 2, 4], [4, 0, 0, 0], [2, 3, 4, 1], [3, 3, 3, 3], [0, 4, 1, 2], [1, 2, 3, 4]]
)
WEIGHTS = torch.softmax(numbers("weights", IMAGES, 4), 1)
CLASS_WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 0.7, 20.0], dtype=torch.float64)


@pytest.mark.parametrize(("over", "smoothing"), [("all", 0.0), ("all", 0.1), ("others", 0.1), ("others", 0.3)])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS], ids=["equal", "weighted"])
def test_cross_entropy_is_the_sum_over_images_of_its_definition(
    over: Any, smoothing: float, mixed: bool, class_weights: Tensor | None
) -> None:
    loss = make_loss(Loss(label_smoothing=smoothing, smooth_over=over), CLASSES, class_weights)
    weights = WEIGHTS if mixed else torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64).expand(IMAGES, 4)
    target = dense(LABELS, weights)
    if over == "all":
        target = (1 - smoothing) * target + smoothing / CLASSES
    else:
        target = (1 - smoothing) * target + smoothing / (CLASSES - 1) * (1 - target)
    counted = target if class_weights is None else target * class_weights
    expected = -(counted * torch.log_softmax(SCORES, 1)).sum()
    found = loss(SCORES, LABELS, WEIGHTS) if mixed else loss(SCORES, LABELS[:, 0], None)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS], ids=["equal", "weighted"])
def test_binary_loss_is_the_mean_over_classes_summed_over_images(
    threshold: float | None, mixed: bool, class_weights: Tensor | None
) -> None:
    loss = make_loss(Loss(kind="binary", label_smoothing=0.1, threshold=threshold), CLASSES, class_weights)
    weights = WEIGHTS if mixed else torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64).expand(IMAGES, 4)
    target = 0.9 * dense(LABELS, weights) + 0.1 / CLASSES
    if threshold is not None:
        target = (target > threshold).double()
    share = torch.sigmoid(SCORES)
    counted = target if class_weights is None else target * class_weights
    expected = -(counted * share.log() + (1 - target) * (1 - share).log()).mean(1).sum()
    found = loss(SCORES, LABELS, WEIGHTS) if mixed else loss(SCORES, LABELS[:, 0], None)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_those_of_torch_for_labels_and_for_mixed_targets(smoothing: float) -> None:
    loss = make_loss(Loss(label_smoothing=smoothing), CLASSES, CLASS_WEIGHTS)
    ours = loss(SCORES, LABELS[:, 0], None), loss(SCORES, LABELS, WEIGHTS)
    for found, target in zip(ours, (LABELS[:, 0], dense(LABELS, WEIGHTS)), strict=True):
        theirs = F.cross_entropy(SCORES, target, CLASS_WEIGHTS, reduction="sum", label_smoothing=smoothing)
        assert float(found) == pytest.approx(float(theirs), rel=1e-14)


@pytest.mark.parametrize("kind", ["cross-entropy", "binary"])
def test_gradients_flow_and_are_finite_for_extreme_scores(kind: Any) -> None:
    scores = (SCORES * 1e4).requires_grad_()
    make_loss(Loss(kind=kind, label_smoothing=0.1), CLASSES)(scores, LABELS, WEIGHTS).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert scores.grad.any()
