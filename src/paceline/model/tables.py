"""Facts about each network without building it (no torch): size, memory, blocks, native images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.facts import DataFacts, NetworkFacts
from paceline.model import inception_tables, mobile_tables
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
    Model,
    ResNet,
    ResNeXt,
    Vgg,
)

BASIC = ("resnet10", "resnet18", "resnet34")
"""The ImageNet networks whose units are not bottlenecks."""
DEPTHS: dict[str, tuple[int, ...]] = {
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
    "resnet26": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnext14": (1, 1, 1, 1),
    "resnext26": (2, 2, 2, 2),
    "resnext50": (3, 4, 6, 3),
    "resnext101": (3, 4, 23, 3),
    "resnext152": (3, 8, 36, 3),
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
"""How many units, or convolutions, each stage has."""


@dataclass(frozen=True)
class Member:
    """A network of a family, as it is by default."""

    name: str
    parameters: int
    activations: int
    """Numbers that one image leaves for the backward pass, counted in units of four bytes."""
    classes: int
    class_parameters: int
    """How many of the parameters each class has."""
    side: int
    stride: int
    """How many times smaller than the image the last picture is, a side."""
    smallest_side: int = 1


MEMBERS = (
    Member("alexnet", 61100840, 926080, 1000, 4097, 224, 32, 63),
    Member("vgg11", 132863336, 12192256, 1000, 4097, 224, 32, 32),
    Member("vgg13", 133047848, 17009152, 1000, 4097, 224, 32, 32),
    Member("vgg16", 138357544, 18313728, 1000, 4097, 224, 32, 32),
    Member("vgg19", 143667240, 19618304, 1000, 4097, 224, 32, 32),
    Member("vgg11-bn", 132868840, 19618304, 1000, 4097, 224, 32, 32),
    Member("vgg13-bn", 133053736, 29252096, 1000, 4097, 224, 32, 32),
    Member("vgg16-bn", 138365992, 31861248, 1000, 4097, 224, 32, 32),
    Member("vgg19-bn", 143678248, 34470400, 1000, 4097, 224, 32, 32),
    Member("resnet10", 5418792, 4039680, 1000, 513, 224, 32),
    Member("resnet14", 10064936, 9435136, 1000, 2049, 224, 32),
    Member("resnet18", 11689512, 5544960, 1000, 513, 224, 32),
    Member("resnet26", 15995176, 13950976, 1000, 2049, 224, 32),
    Member("resnet34", 21797672, 8053760, 1000, 513, 224, 32),
    Member("resnet50", 25557032, 21477376, 1000, 2049, 224, 32),
    Member("resnet101", 44549160, 31713280, 1000, 2049, 224, 32),
    Member("resnet152", 60192808, 44357632, 1000, 2049, 224, 32),
    Member("resnet8", 75290, 150592, 10, 65, 32, 4),
    Member("resnet14-cifar", 172506, 265280, 10, 65, 32, 4),
    Member("resnet20", 269722, 379968, 10, 65, 32, 4),
    Member("resnet32", 464154, 609344, 10, 65, 32, 4),
    Member("resnet44", 658586, 838720, 10, 65, 32, 4),
    Member("resnet56", 853018, 1068096, 10, 65, 32, 4),
    Member("resnet110", 1727962, 2100288, 10, 65, 32, 4),
    Member("resnet11-bottleneck", 127642, 568576, 10, 257, 32, 4),
    Member("resnet29-bottleneck", 313114, 1256704, 10, 257, 32, 4),
    Member("resnet38-bottleneck", 405850, 1600768, 10, 257, 32, 4),
    Member("resnet47-bottleneck", 498586, 1944832, 10, 257, 32, 4),
    Member("resnet56-bottleneck", 591322, 2288896, 10, 257, 32, 4),
    Member("resnet65-bottleneck", 684058, 2632960, 10, 257, 32, 4),
    Member("resnext14", 9411880, 11994112, 1000, 2049, 224, 32),
    Member("resnext26", 15389480, 18015232, 1000, 2049, 224, 32),
    Member("resnext50", 25028904, 28050432, 1000, 2049, 224, 32),
    Member("resnext101", 44177704, 41698304, 1000, 2049, 224, 32),
    Member("resnext152", 59951400, 58557440, 1000, 2049, 224, 32),
    Member("resnext11", 403162, 1887488, 10, 257, 32, 4),
    Member("resnext29", 1293786, 4181248, 10, 257, 32, 4),
    Member("resnext38", 1739098, 5328128, 10, 257, 32, 4),
    Member("resnext47", 2184410, 6475008, 10, 257, 32, 4),
    Member("resnext56", 2629722, 7621888, 10, 257, 32, 4),
    Member("resnext65", 3075034, 8768768, 10, 257, 32, 4),
    Member("googlenet", 13004888, 12073696, 1000, 3075, 224, 32, 15),
    Member("inception-v3", 27161264, 24573067, 1000, 2818, 299, 37, 299),
    Member("inception-v4", 42679816, 43036619, 1000, 1537, 299, 37, 75),
    Member("inception-resnet-v2", 55843464, 46049835, 1000, 1537, 299, 37, 75),
    Member("efficientnet-b0", 5288548, 22048513, 1000, 1281, 224, 32),
    Member("efficientnet-b1", 7794184, 35735408, 1000, 1281, 240, 32),
    Member("efficientnet-b2", 9109994, 45458500, 1000, 1409, 260, 32),
    Member("efficientnet-b3", 12233232, 78115747, 1000, 1537, 300, 32),
    Member("efficientnet-b4", 19341616, 163375465, 1000, 1793, 380, 32),
    Member("efficientnet-b5", 30389784, 327158048, 1000, 2049, 456, 32),
    Member("efficientnet-b6", 43040704, 554078646, 1000, 2305, 528, 32),
    Member("efficientnet-b7", 66347960, 962300688, 1000, 2561, 600, 32),
    Member("efficientnet-cifar", 1077932, 3107789, 10, 641, 32, 8),
    Member("efficientnet-lite0", 4652008, 19872108, 1000, 1281, 224, 32),
    Member("efficientnet-lite1", 5416680, 29851265, 1000, 1281, 240, 32),
    Member("efficientnet-lite2", 6092072, 37953289, 1000, 1281, 260, 32),
    Member("efficientnet-lite3", 8197096, 55711572, 1000, 1281, 280, 32),
    Member("efficientnet-lite4", 13006568, 84575058, 1000, 1281, 300, 32),
    Member("mobilenet-v2", 3504872, 19552384, 1000, 1281, 224, 32),
    Member("mobilenet-v3-small", 2542856, 4042456, 1000, 1025, 224, 32),
    Member("mobilenet-v3-large", 5483032, 11028488, 1000, 1281, 224, 32),
)


def member(name: str) -> Member:
    """The network of this name."""
    return next(row for row in MEMBERS if row.name == name)


_WEIGHTLESS = {
    "name", "dropout", "auxiliary_dropout", "survival", "activation", "padding", "version", "blur", "residual_scale",
}  # fmt: skip
"""Settings of networks that no parameter depends on."""


def parameters(model: Model, facts: DataFacts, proxy: bool = False) -> int | None:
    """How many parameters a network has, where that is known without building it."""
    if isinstance(model, External) or proxy or facts.channels != 3:
        return None
    usual = type(model).model_validate({"name": model.name})
    if dict(usual.model_copy(update=model.model_dump(include=_WEIGHTLESS))) != dict(model):
        return None
    row = member(model.name)
    return row.parameters + row.class_parameters * (facts.classes - row.classes)


def network_facts(model: Model, facts: DataFacts) -> NetworkFacts:
    """What a plan must know of a network for images of these facts; activations grow with the picture's area."""
    if isinstance(model, External):  # unknown before its package is loaded: as large as the largest residual network
        largest = network_facts(ResNet(name="resnet152"), facts)
        return NetworkFacts(largest.parameters, largest.activations, blocks=block_names(model))
    row = member(model.name)
    # Without stride and pool in the stem, each later layer sees four times the side.
    finer = 4 if getattr(model, "stem", "7x7") == "3x3" else 1
    activations = round(row.activations * (facts.side * finer / row.side) ** 2)
    last_side = _last_side(model, facts.side * finer)
    norms = not isinstance(model, AlexNet) and not (isinstance(model, Vgg) and not model.name.endswith("-bn"))
    auxiliary = isinstance(model, InceptionV3) and model.auxiliary > 0
    smallest = smallest_side(model)
    return NetworkFacts(row.parameters, activations, smallest, last_side, block_names(model), norms, auxiliary)


def smallest_side(model: Model) -> int:
    """Pixels a side below which some layer of a network has no picture left."""
    if isinstance(model, External):
        return 1
    if isinstance(model, InceptionV3) and not model.auxiliary:
        return 75
    return member(model.name).smallest_side


def _last_side(model: Model, side: int) -> int:
    """Fewest pixels a side that a norm of a network sees, auxiliary heads included."""
    match model:
        case Vgg():
            return side // 16  # the last pool comes after the last norm
        case GoogLeNet():
            return min(math.ceil((side + 1) // 16 / 2), 4 if model.auxiliary else side)
        case InceptionV3() | InceptionV4() | InceptionResNetV2():
            for lost in (2, 2, 0, 0):
                side = (side - 1) // 2 - lost
            auxiliary = isinstance(model, InceptionV3) and model.auxiliary
            return (side - 5) // 3 - 3 if auxiliary else (side - 1) // 2
        case _:
            return math.ceil(side / member(model.name).stride)


def cifar_depths(name: str) -> tuple[int, ...]:
    """Units of the three stages of a network for 32-pixel images, whose depth is 6n+2, or 9n+2 with bottlenecks."""
    digits = "".join(letter for letter in name if letter.isdigit())
    basic = name.startswith("resnet") and not name.endswith("-bottleneck")
    return ((int(digits) - 2) // (6 if basic else 9),) * 3


def block_names(model: Model) -> tuple[str, ...]:
    """The blocks of a network, in order."""
    match model:
        case AlexNet():
            return ("conv1", "conv2", "conv3", "conv4", "conv5", "dense1", "dense2", "head")
        case Vgg():
            dense = ("dense1", "dense2") if model.head == "dense" else ()
            return (*_stages(DEPTHS[model.name.removesuffix("-bn")], "conv"), *dense, "head")
        case ResNet() | ResNeXt():
            return ("stem", *_stages(DEPTHS[model.name]), "head")
        case CifarResNet() | CifarResNeXt():
            return ("stem", *_stages(cifar_depths(model.name)), "head")
        case GoogLeNet() | InceptionV3() | InceptionV4() | InceptionResNetV2():
            return (*(name for name, _ in inception_tables.modules(model)), "head")
        case EfficientNet() | MobileNetV2() | MobileNetV3():
            hidden = ("dense1",) if isinstance(model, MobileNetV3) else ()
            return ("stem", *mobile_tables.shape(model).units, "top", *hidden, "head")
        case External():
            return ("network",)


def _stages(depths: tuple[int, ...], unit: str = "unit") -> tuple[str, ...]:
    return tuple(f"stage{s}/{unit}{u}" for s, depth in enumerate(depths, 1) for u in range(1, depth + 1))
