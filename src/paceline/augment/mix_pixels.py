"""Mixup and cutmix on the device: neighbors in a block exchange pixels, and their labels share the target."""

from __future__ import annotations

import torch
from torch import Tensor


def mix(images: Tensor, labels: Tensor, drawn: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mixed images, and the labels and weights of the four images that may have a part in each.

    `drawn` has a row for each of `data.mix.ROWS`. An image is blended with the next of its block; then a box of the
    blend after the next, two on (one in a block of two), is pasted into it.
    """
    own, *edges = drawn.to(images.dtype)
    numbers = torch.arange(len(images), device=images.device)
    first = _neighbor(numbers, 1, block)
    second = _neighbor(numbers, 2 if block > 2 else 1, block)
    share = own[:, None, None, None]
    blended = share * images + (1 - share) * images[first]
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[2:])
    top, left, bottom, right = (edge[:, None] for edge in edges)
    high = (rows >= top) & (rows < bottom)
    wide = (columns >= left) & (columns < right)
    inside = (high[:, :, None] & wide[:, None, :])[:, None]
    pasted = torch.where(inside, blended[second], blended)
    area = ((bottom - top) * (right - left) / images.shape[2:].numel())[:, 0]  # what counts is what was pasted
    theirs = own[second]
    weights = [own * (1 - area), (1 - own) * (1 - area), theirs * area, (1 - theirs) * area]
    terms = [labels, labels[first], labels[second], labels[first[second]]]
    return pasted, torch.stack(terms, 1), torch.stack(weights, 1)


def _neighbor(numbers: Tensor, distance: int, block: int) -> Tensor:
    """The image so many places on in its block, which is a ring."""
    return numbers - numbers % block + (numbers % block + distance) % block
