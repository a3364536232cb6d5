"""What is known of each network without building it: size, memory, native images; a test builds them all and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan import Appetite
from paceline.recipe import Facts, Model


@dataclass(frozen=True)
class Member:
    """A network of a family, as it is by default."""

    name: str
    parameters: int
    activations: int
    """Numbers that one image leaves for the backward pass: outputs of convolutions and norms."""
    classes: int
    side: int
    stride: int
    """How many times smaller than the image the last picture is, a side."""
    smallest_side: int = 1


MEMBERS = (
    Member("resnet10", 5418792, 3462144, 1000, 224, 32),
    Member("resnet14", 10064936, 10185728, 1000, 224, 32),
    Member("resnet18", 11689512, 4967424, 1000, 224, 32),
    Member("resnet26", 15995176, 14701568, 1000, 224, 32),
    Member("resnet34", 21797672, 7476224, 1000, 224, 32),
    Member("resnet50", 25557032, 22227968, 1000, 224, 32),
    Member("resnet101", 44549160, 32463872, 1000, 224, 32),
    Member("resnet152", 60192808, 45108224, 1000, 224, 32),
    Member("resnet8", 75290, 147456, 10, 32, 4),
    Member("resnet14-cifar", 172506, 262144, 10, 32, 4),
    Member("resnet20", 269722, 376832, 10, 32, 4),
    Member("resnet32", 464154, 606208, 10, 32, 4),
    Member("resnet44", 658586, 835584, 10, 32, 4),
    Member("resnet56", 853018, 1064960, 10, 32, 4),
    Member("resnet110", 1727962, 2097152, 10, 32, 4),
    Member("resnet11-bottleneck", 127642, 679936, 10, 32, 4),
    Member("resnet29-bottleneck", 313114, 1368064, 10, 32, 4),
    Member("resnet38-bottleneck", 405850, 1712128, 10, 32, 4),
    Member("resnet47-bottleneck", 498586, 2056192, 10, 32, 4),
    Member("resnet56-bottleneck", 591322, 2400256, 10, 32, 4),
    Member("resnet65-bottleneck", 684058, 2744320, 10, 32, 4),
)


def member(name: str) -> Member:
    """The network of this name."""
    return next(row for row in MEMBERS if row.name == name)


def appetite(model: Model, facts: Facts) -> Appetite:
    """What a network needs for images of these facts; activations grow with the picture's area."""
    row = member(model.name)
    # Without stride and pool in the stem, each later layer sees four times the side.
    finer = 4 if getattr(model, "stem", "7x7") == "3x3" else 1
    activations = round(row.activations * (facts.side * finer / row.side) ** 2)
    return Appetite(row.parameters, activations, row.smallest_side, math.ceil(facts.side * finer / row.stride))
