"""Pieces that several architectures are made of."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from paceline.model.norm import BatchNormAct, GroupNormAct, NormAct, Role
from paceline.recipe import BatchNorm, GroupNorm, NoNorm, Recipe

MakeNorm = Callable[[int, bool, Role], NormAct]


def norm_maker(recipe: Recipe) -> MakeNorm:
    """make_norm(channels, activate, role) for the normalisation a recipe asks for."""

    def make(channels: int, activate: bool = True, role: Role = "plain") -> NormAct:
        match recipe.norm:
            case BatchNorm(momentum=momentum, epsilon=epsilon):
                return BatchNormAct(channels, momentum, epsilon, activate, role)
            case GroupNorm(groups=groups, epsilon=epsilon):
                return GroupNormAct(channels, groups, epsilon, activate, role)
            case NoNorm():
                return NormAct(channels, activate, role)

    return make


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the side, or halves it with stride 2."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Head(nn.Module):
    """Mean over the picture, then one score for each class."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.dense(x.mean((2, 3)))
        return scores
