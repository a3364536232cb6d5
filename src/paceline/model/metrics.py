"""What training and validation sum over images; means are taken once, from the sums over all replicas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.device import widest_float

TRAIN_SUMS = ("loss", "hits")
"""What is summed over the images of a step."""
EVAL_SUMS = ("loss", "top1", "top5", "images")
"""What is summed over validation images."""


def evaluation_sums(scores: Tensor, labels: Tensor, count: int) -> Tensor:
    """EVAL_SUMS over the first `count` images of a batch, in float64 where the device has it."""
    real = torch.arange(len(scores), device=scores.device) < count
    losses = F.cross_entropy(scores, labels, reduction="none")
    hits = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    rows = torch.stack([values.to(scores.dtype) for values in (losses, hits[:, 0], hits.any(1), real)])
    return torch.where(real, rows, 0).to(widest_float(scores.device)).sum(1)
