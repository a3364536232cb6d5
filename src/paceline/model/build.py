"""From a recipe's model settings to a network: an ordered list of named blocks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from paceline.facts import DataFacts
from paceline.model.alexnet import alexnet_blocks
from paceline.model.external import external_blocks
from paceline.model.inception import googlenet_blocks, inception_blocks, inception_resnet_blocks
from paceline.model.layers import MakeNorm
from paceline.model.mobile import inverted_blocks, mobilenet3_blocks
from paceline.model.network import Network
from paceline.model.resnet import cifar_resnet_blocks, cifar_resnext_blocks, resnet_blocks, resnext_blocks
from paceline.model.vgg import vgg_blocks
from paceline.settings.model import (
    AlexNet,
    CifarResNet,
    CifarResNeXt,
    EfficientNet,
    External,
    GoogLeNet,
    InceptionResNetV2,
    InceptionV3,
    InceptionV4,
    MobileNetV2,
    MobileNetV3,
    ResNet,
    ResNeXt,
    Vgg,
)
from paceline.settings.recipe import Recipe


def build_network(recipe: Recipe, facts: DataFacts) -> Network:
    """The network of a recipe for images of these facts, its weights not yet set."""
    return Network(OrderedDict(_blocks(recipe, facts)))


def _blocks(recipe: Recipe, facts: DataFacts) -> dict[str, nn.Module]:  # noqa: C901 - one case for each family
    model, make_norm = recipe.model, MakeNorm(recipe.norm)
    shape = facts.channels, facts.classes
    match model:
        case AlexNet():
            return alexnet_blocks(model, *shape, make_norm)
        case Vgg():
            return vgg_blocks(model, *shape, make_norm)
        case ResNet():
            return resnet_blocks(model, *shape, make_norm)
        case CifarResNet():
            return cifar_resnet_blocks(model, *shape, make_norm)
        case ResNeXt():
            return resnext_blocks(model, *shape, make_norm)
        case CifarResNeXt():
            return cifar_resnext_blocks(model, *shape, make_norm)
        case GoogLeNet():
            return googlenet_blocks(model, *shape, make_norm)
        case InceptionV3() | InceptionV4():
            return inception_blocks(model, *shape, make_norm)
        case InceptionResNetV2():
            return inception_resnet_blocks(model, *shape, make_norm)
        case EfficientNet() | MobileNetV2():
            return inverted_blocks(model, *shape, make_norm)
        case MobileNetV3():
            return mobilenet3_blocks(model, *shape, make_norm)
        case External():
            return external_blocks(model, facts, make_norm, recipe.seed)
