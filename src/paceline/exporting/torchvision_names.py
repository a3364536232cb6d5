"""The names that torchvision gives the tensors of the networks that it has too."""

from __future__ import annotations

import re

from torch import nn

from paceline.errors import RunError
from paceline.model.alexnet import Convolution
from paceline.model.mobile import InvertedUnit
from paceline.model.network import Network
from paceline.settings.model import (
    AlexNet,
    EfficientNet,
    External,
    MobileNetV2,
    MobileNetV3,
    Model,
    ResNet,
    ResNeXt,
    Vgg,
)
from paceline.settings.recipe import BatchNorm, Recipe

_TWINS = re.compile(
    r"alexnet|vgg(11|13|16|19)(-bn)?|resnet(18|34|50|101|152)|efficientnet-b[0-7]|mobilenet-v2|mobilenet-v3-(small|large)"
)
"""What torchvision has under the same name."""
_RESNEXT = {("resnext50", 32, 4): "resnext50_32x4d", ("resnext101", 32, 8): "resnext101_32x8d",
            ("resnext101", 64, 4): "resnext101_64x4d"}  # fmt: skip
_FREE = {"dropout", "survival"}
"""Settings that matter in training only."""


def twin(recipe: Recipe) -> str:
    """The network of torchvision that computes the same; a RunError if there is none."""
    model, norm = recipe.model, recipe.norm
    if isinstance(model, External) and model.name == "torchvision":
        return model.network
    name = _twin_name(model)
    if name is None or not isinstance(norm, BatchNorm) or norm.epsilon is not None:
        raise RunError(
            f"--to torchvision: torchvision has no network that computes what this {model.name} does; it has AlexNet, "
            "VGG, ResNet, ResNeXt, EfficientNet and MobileNet as published; write --to onnx, pt2 or safetensors"
        )
    return name


def _twin_name(model: Model) -> str | None:
    if isinstance(model, ResNeXt):
        same = (model.version, model.stem) == ("v1.5", "7x7")
        return _RESNEXT.get((model.name, model.cardinality, model.group_width)) if same else None
    if not _TWINS.fullmatch(model.name):
        return None
    published = type(model).model_validate({"name": model.name})
    same = all(getattr(model, key) == value for key, value in published if key not in _FREE)
    return model.name.replace("-", "_") if same else None


def torchvision_names(model: Model, network: Network) -> dict[str, str]:
    """For each of our tensors the name that torchvision has for it."""
    if isinstance(model, External):
        return {name: name.removeprefix("network.network.") for name in network.state_dict()}
    if isinstance(model, ResNet | ResNeXt):
        return {name: _residual(name) for name in network.state_dict()}
    prefixes = _stacked(model, network) if isinstance(model, AlexNet | Vgg) else _inverted(model, network)
    return {name: _renamed(name, prefixes) for name in network.state_dict()}


def _residual(name: str) -> str:
    name = re.sub(r"^stage(\d+)/unit(\d+)", lambda match: f"layer{match[1]}.{int(match[2]) - 1}", name)
    name = name.replace("stem.conv", "conv1").replace("stem.norm", "bn1").replace("head.dense", "fc")
    name = name.replace("projection_norm", "downsample.1").replace("projection", "downsample.0")
    return re.sub(r"\bnorm(\d)", r"bn\1", name)


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    module, _, last = name.rpartition(".")
    return f"{prefixes[module]}.{last}"


def _stacked(model: Model, network: Network) -> dict[str, str]:
    """AlexNet and VGG: one list of convolutions, norms, activations and pools, and one of dense layers."""
    index, prefixes = 0, dict[str, str]()
    for name, block in network.named_children():
        if isinstance(block, Convolution):
            prefixes |= {f"{name}.conv": f"features.{index}", f"{name}.norm": f"features.{index + 1}"}
            index += 2 + (block.norm is not None) + bool(block.pool)
    dense = (1, 4, 6) if isinstance(model, AlexNet) else (0, 3, 6)  # dropouts stand before or behind a layer
    names = ("dense1", "dense2", "head")
    return prefixes | {f"{name}.dense": f"classifier.{at}" for name, at in zip(names, dense, strict=True)}


def _inverted(model: Model, network: Network) -> dict[str, str]:
    """EfficientNets and MobileNets: a list of units, each a list of layers."""
    prefixes = {"stem.conv": "features.0.0", "stem.norm": "features.0.1"}
    last = 0
    for number, (name, unit) in enumerate(network.named_children()):
        if isinstance(unit, InvertedUnit):
            stage, place = re.findall(r"\d+", name)
            by_stage = isinstance(model, EfficientNet)
            where = f"features.{stage}.{int(place) - 1}" if by_stage else f"features.{number}"
            prefixes |= _unit(name, unit, where, isinstance(model, MobileNetV2))
            last = int(stage) if by_stage else number
    prefixes |= {"top.conv": f"features.{last + 1}.0", "top.norm": f"features.{last + 1}.1"}
    head = "classifier.3" if isinstance(model, MobileNetV3) else "classifier.1"
    return prefixes | {"dense1.dense": "classifier.0", "head.dense": head}


def _unit(name: str, unit: InvertedUnit, where: str, flat: bool) -> dict[str, str]:
    """The layers of a unit; with `flat`, the last convolution and norm lie beside the others, not in a list."""
    inside = f"{where}.{'conv' if flat else 'block'}"
    words = {"conv": "0", "norm": "1", "squeeze": "fc1", "excite": "fc2"}
    layers: list[tuple[str, nn.Module]] = list(unit.wide.named_children())
    prefixes = {
        f"{name}.wide.{index}.{part}": f"{inside}.{index}.{words[part]}"
        for index, layer in layers
        for part, _ in layer.named_children()
    }
    count = len(layers)
    if flat:
        return prefixes | {f"{name}.conv": f"{inside}.{count}", f"{name}.norm": f"{inside}.{count + 1}"}
    return prefixes | {f"{name}.conv": f"{inside}.{count}.0", f"{name}.norm": f"{inside}.{count}.1"}
