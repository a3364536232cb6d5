"""From a recipe's model settings to a network: an ordered list of named blocks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from paceline.model.parts import MakeNorm, norm_maker
from paceline.model.resnet import cifar_resnet_blocks, resnet_blocks
from paceline.recipe import CifarResNet, Facts, Model, Recipe, ResNet


def build_network(recipe: Recipe, facts: Facts) -> nn.Sequential:
    """The network of a recipe for images of these facts, its weights not yet set."""
    blocks = _blocks(recipe.model, facts, norm_maker(recipe))
    return nn.Sequential(OrderedDict(blocks))


def _blocks(model: Model, facts: Facts, make_norm: MakeNorm) -> dict[str, nn.Module]:
    match model:
        case ResNet():
            return resnet_blocks(model, facts.channels, facts.classes, make_norm)
        case CifarResNet():
            return cifar_resnet_blocks(model, facts.channels, facts.classes, make_norm)
