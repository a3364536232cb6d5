"""Inception v4: the published size, modules and pictures, and a notation that says what is built."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.dropout import Dropout
from paceline.model.inception import Branches, inception_blocks
from paceline.model.layers import Head, MakeNorm, MeanPool
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.settings.model import InceptionV4
from paceline.settings.recipe import BatchNorm

MAKE_NORM = MakeNorm(BatchNorm(name="batch"))
NAMES = [
    *("stem/conv1", "stem/conv2", "stem/conv3", "stem/mixed3a", "stem/mixed4a", "stem/mixed5a"),
    *("stage1/unit1", "stage1/unit2", "stage1/unit3", "stage1/unit4", "reduction1"),
    *("stage2/unit1", "stage2/unit2", "stage2/unit3", "stage2/unit4", "stage2/unit5", "stage2/unit6", "stage2/unit7"),
    *("reduction2", "stage3/unit1", "stage3/unit2", "stage3/unit3", "head"),
]


def blocks(
    channels: int = 3, classes: int = 1000, make_norm: MakeNorm = MAKE_NORM, dropout: float = 0.0
) -> dict[str, nn.Module]:
    """The blocks of a network that has shapes but no memory."""
    with torch.device("meta"):
        return inception_blocks(InceptionV4(name="inception-v4", dropout=dropout), channels, classes, make_norm)


def size(parts: dict[str, nn.Module]) -> int:
    return sum(parameter.numel() for part in parts.values() for parameter in part.parameters())


def scores(side: int, channels: int = 3, classes: int = 1000) -> Tensor:
    network = Network(OrderedDict(blocks(channels, classes))).eval()
    y = network(torch.empty(2, channels, side, side, device="meta"))
    assert isinstance(y, Tensor)
    return y


def test_the_size_is_the_published_one() -> None:
    assert size(blocks()) == 42_679_816


def test_the_blocks_are_named_in_order() -> None:
    assert list(blocks()) == NAMES


def test_channels_and_classes_change_the_first_and_the_last_block_only() -> None:
    assert size(blocks(channels=1)) == 42_679_816 - 2 * 9 * 32
    assert size(blocks(classes=10)) == 42_679_816 - 990 * (1536 + 1)
    assert scores(107, channels=1, classes=10).shape == (2, 10)


def test_pictures_have_the_paper_s_shapes() -> None:
    x, shapes = torch.empty(1, 3, 299, 299, device="meta"), {}
    for name, block in blocks().items():
        x = block(x, None)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["stem/conv3"] == (64, 147, 147)
    assert shapes["stem/mixed3a"] == (160, 73, 73)
    assert shapes["stem/mixed4a"] == (192, 71, 71)
    assert shapes["stem/mixed5a"] == shapes["stage1/unit4"] == (384, 35, 35)
    assert shapes["reduction1"] == shapes["stage2/unit7"] == (1024, 17, 17)
    assert shapes["reduction2"] == shapes["stage3/unit3"] == (1536, 8, 8)


def test_the_smallest_side_is_75() -> None:
    assert scores(75).shape == (2, 1000)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        scores(74)


def test_weights_come_in_the_published_order() -> None:
    shapes = [tuple(part.weight.shape) for part in blocks()["stage3/unit1"].modules() if isinstance(part, nn.Conv2d)]
    assert shapes == [
        (256, 1536, 1, 1),
        *((384, 1536, 1, 1), (256, 384, 1, 3), (256, 384, 3, 1)),
        *((384, 1536, 1, 1), (448, 384, 3, 1), (512, 448, 1, 3), (256, 512, 1, 3), (256, 512, 3, 1)),
        (256, 1536, 1, 1),
    ]


def test_norms_have_the_published_epsilon_unless_the_recipe_names_one() -> None:
    def epsilons(make_norm: MakeNorm) -> set[float]:
        parts = Network(OrderedDict(blocks(make_norm=make_norm))).modules()
        return {part.epsilon for part in parts if isinstance(part, BatchNormAct)}

    assert epsilons(MAKE_NORM) == {0.001}
    assert epsilons(MakeNorm(BatchNorm(name="batch", epsilon=0.0001))) == {0.0001}


def test_dropout_stands_before_the_last_dense_layer() -> None:
    head = blocks(dropout=0.2)["head"]
    assert isinstance(head, Head)
    assert isinstance(head.dropout, Dropout)
    assert (head.dropout.rate, head.dropout.features) == (0.2, 1536)


def test_chains_are_joined_as_channels_in_order() -> None:
    mixed = Branches("max/2 | 3x3/2:3 1x1:4", 2, MAKE_NORM)
    x = torch.linspace(-1, 1, 2 * 81).reshape(1, 2, 9, 9)
    y = mixed(x, None)
    assert mixed.outputs == y.shape[1] == 6
    assert torch.equal(y[:, :2], F.max_pool2d(x, 3, 2))
    assert torch.equal(y[:, 2:], mixed[1](x, None))


@pytest.mark.parametrize(
    ("chain", "channels", "rows", "columns"),
    [
        ("1x7:5", 5, 9, 8),
        ("7x1:5", 5, 9, 8),
        ("3x3v:5", 5, 7, 6),
        ("1x3v:5", 5, 9, 6),
        ("3x3/2:5", 5, 4, 3),
        ("1x3+3x1:5", 10, 9, 8),
        ("mean", 2, 9, 8),
        ("inner-mean", 2, 9, 8),
        ("max", 2, 9, 8),
        ("max/2", 2, 4, 3),
    ],
)
def test_a_layer_is_what_is_written(chain: str, channels: int, rows: int, columns: int) -> None:
    mixed = Branches(chain, 2, MAKE_NORM)
    assert mixed(torch.ones(1, 2, 9, 8), None).shape == (1, channels, rows, columns)
    assert mixed.outputs == channels


@pytest.mark.parametrize(("layer", "corner"), [("inner-mean", 1), ("mean", 4 / 9)])
def test_a_mean_counts_what_lies_outside_as_black_unless_it_is_an_inner_one(layer: str, corner: float) -> None:
    y = Branches(layer, 1, MAKE_NORM)(torch.ones(1, 1, 4, 4, dtype=torch.float64), None)
    assert y[0, 0, 0, 0] == pytest.approx(corner)
    assert torch.allclose(y[:, :, 1:3, 1:3], torch.ones(1, 1, 2, 2, dtype=torch.float64))


def test_the_means_of_its_modules_are_inner_ones() -> None:
    means = [part for block in blocks().values() for part in block.modules() if isinstance(part, MeanPool)]
    assert len(means) == 4 + 7 + 3
    assert all(part.inner for part in means)


@pytest.mark.parametrize("layer", ["3:64", "median", "3x3", "3x3:many", "axb:64", "3x3/half:64"])
def test_a_layer_that_means_nothing_is_refused(layer: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        Branches(layer, 2, MAKE_NORM)
