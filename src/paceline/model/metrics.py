"""What training and validation sum over images; means are taken once, from the sums over all replicas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.device import widest_float

TRAIN_SUMS = ("loss", "hits")
"""What is summed over the images of a step."""
Evaluation = dict[str, float | int]
"""Mean loss, top-1 and top-5 accuracy, and the number of images they are of: what a row of the record tells."""


class EvaluationSums(NamedTuple):
    """What is summed over validation images. A field may be a vector, such as one with a count for each class: whoever
    adds sums up takes them all in one tensor, whatever their shapes."""

    loss: Tensor
    top1: Tensor
    top5: Tensor
    images: Tensor

    @classmethod
    def zeros(cls, classes: int, device: torch.device) -> EvaluationSums:
        """The sums over no image."""
        scores = torch.zeros(0, classes, dtype=widest_float(device), device=device)
        return evaluation_sums(scores, torch.zeros(0, dtype=torch.int64, device=device), 0)

    def flat(self) -> Tensor:
        """All of them in one tensor."""
        return torch.cat([sums.flatten() for sums in self])

    def unflatten(self, flat: Tensor) -> EvaluationSums:
        """Sums of these shapes from one tensor."""
        pieces = flat.split([sums.numel() for sums in self])
        return EvaluationSums(*(piece.view_as(sums) for piece, sums in zip(pieces, self, strict=True)))

    def means(self) -> Evaluation:
        """The means over all images, and how many these are."""
        images = int(self.images)
        means = {"loss": self.loss, "top1": self.top1, "top5": self.top5}
        return {name: float(total) / images for name, total in means.items()} | {"images": images}


def evaluation_sums(scores: Tensor, labels: Tensor, count: int) -> EvaluationSums:
    """Sums over the first `count` images of a batch, in float64 where the device has it."""
    real = torch.arange(len(scores), device=scores.device) < count
    losses = F.cross_entropy(scores, labels, reduction="none")
    hits = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    rows = torch.stack([values.to(scores.dtype) for values in (losses, hits[:, 0], hits.any(1), real)])
    loss, top1, top5, images = torch.where(real, rows, 0).to(widest_float(scores.device)).sum(1)
    return EvaluationSums(loss, top1, top5, images)
