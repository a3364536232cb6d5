"""The loss of a batch, summed over images; mixed images have several labels with weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.settings.recipe import Loss

Losses = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""loss(scores, labels, weights): labels are [images], or [images, terms] with weights that add up to 1."""


def make_loss(settings: Loss, classes: int, class_weights: Tensor | None = None) -> Losses:
    """The loss of a recipe; each part of a target counts as much as the weight of its class says."""
    smoothing = settings.label_smoothing
    # Spread over the other classes only, epsilon is what torch calls epsilon * K / (K - 1).
    smoothing *= classes / (classes - 1) if smoothing and settings.smooth_over == "others" else 1

    def cross_entropy(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return F.cross_entropy(scores, labels, class_weights, reduction="sum", label_smoothing=smoothing)
        terms = F.log_softmax(scores, 1)
        if class_weights is not None:
            terms = terms * class_weights
        labeled = (terms.gather(1, labels) * weights).sum()
        return -((1 - smoothing) * labeled + smoothing * terms.mean(1).sum())

    def binary(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            labels, weights = labels[:, None], torch.ones_like(scores[:, :1])
        targets = torch.zeros_like(scores).scatter_add_(1, labels, weights)
        targets = (1 - smoothing) * targets + smoothing / classes
        if settings.threshold is not None:
            targets = (targets > settings.threshold).to(scores.dtype)
        loss = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum", pos_weight=class_weights)
        return loss / classes

    return cross_entropy if settings.kind == "cross-entropy" else binary
