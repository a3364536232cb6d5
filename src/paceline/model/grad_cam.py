"""Grad-CAM: where in an image a network sees what speaks for a class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import RunError
from paceline.model.network import Network


def grad_cam(network: Network, images: Tensor, classes: Tensor) -> Tensor:
    """For each normalized image a map [rows, columns] from 0 to 1 of what speaks for its class.

    It is taken behind the last block whose picture has more than one pixel: the channels there, weighted by the mean
    gradient of the class score, and only what speaks for the class.
    """
    with torch.no_grad():
        picture, rest = _last_picture(network, images)
    picture.requires_grad_()
    with torch.enable_grad():
        scores = rest(picture.clone(), batch=None)  # a block may activate in place
        (gradient,) = torch.autograd.grad(scores.gather(1, classes[:, None]).sum(), picture)
    heat = (gradient.mean((2, 3), keepdim=True) * picture.detach()).sum(1, keepdim=True).relu().float()
    heat = F.interpolate(heat, images.shape[2:], mode="bilinear")
    return (heat / heat.amax((2, 3), keepdim=True).clamp(min=torch.finfo(heat.dtype).tiny))[:, 0]


def _last_picture(network: Network, images: Tensor) -> tuple[Tensor, Network]:
    """What the last block that still has space gives, and the blocks behind it."""
    names, last = list(network._modules), None
    x = images
    for name, block in network.named_children():
        x = block(x, None)
        if x.dim() == 4 and x.shape[2] * x.shape[3] > 1:
            last = names.index(name), x
    if last is None or last[0] == len(names) - 1:
        raise RunError("--heatmap: this network has no block whose picture has more than one pixel; leave it out")
    return last[1], network.cut([names[last[0] + 1]])[1]
