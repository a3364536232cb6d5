"""From a recipe's model settings to a network: an ordered list of named blocks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from paceline.model.parts import norm_maker
from paceline.model.resnet import cifar_resnet_blocks, resnet_blocks
from paceline.recipe import CifarResNet, Facts, Recipe, ResNet


def build_network(recipe: Recipe, facts: Facts) -> nn.Sequential:
    """The network of a recipe for images of these facts, its weights not yet set."""
    make_norm = norm_maker(recipe)
    match recipe.model:
        case ResNet():
            blocks = resnet_blocks(recipe.model, facts.channels, facts.classes, make_norm)
        case CifarResNet():
            blocks = cifar_resnet_blocks(recipe.model, facts.channels, facts.classes, make_norm)
    return nn.Sequential(OrderedDict(blocks))
