"""Inception-ResNet v2: the published size and pictures, and residual units that are scaled as the settings say."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from paceline.model.dropout import Dropout
from paceline.model.inception import ScaledResidual, inception_resnet_blocks
from paceline.model.layers import Head, MakeNorm
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.settings.model import InceptionResNetV2
from paceline.settings.recipe import BatchNorm

MAKE_NORM = MakeNorm(BatchNorm(name="batch"))
PUBLISHED = InceptionResNetV2(name="inception-resnet-v2")
NVCNN = InceptionResNetV2(name="inception-resnet-v2", units=(5, 10, 5), residual_scale=(0.2, 0.2, 0.2))


def blocks(model: InceptionResNetV2 = PUBLISHED, channels: int = 3, classes: int = 1000) -> dict[str, nn.Module]:
    """The blocks of a network that has shapes but no memory."""
    with torch.device("meta"):
        return inception_resnet_blocks(model, channels, classes, MAKE_NORM)


def size(*parts: nn.Module) -> int:
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def scores(side: int, channels: int = 3, classes: int = 1000) -> Tensor:
    network = Network(OrderedDict(blocks(PUBLISHED, channels, classes))).eval()
    y = network(torch.empty(2, channels, side, side, device="meta"))
    assert isinstance(y, Tensor)
    return y


def units(model: InceptionResNetV2) -> dict[str, ScaledResidual]:
    return {name: block for name, block in blocks(model).items() if isinstance(block, ScaledResidual)}


def test_the_size_is_the_published_one() -> None:
    assert size(*blocks().values()) == 55_843_464


def test_the_blocks_are_named_in_order() -> None:
    assert list(blocks()) == [
        *("stem/conv1", "stem/conv2", "stem/conv3", "stem/conv4", "stem/conv5", "mixed5b"),
        *(f"stage1/unit{unit}" for unit in range(1, 11)),
        "reduction1",
        *(f"stage2/unit{unit}" for unit in range(1, 21)),
        "reduction2",
        *(f"stage3/unit{unit}" for unit in range(1, 11)),
        *("top", "head"),
    ]


def test_fewer_units_leave_out_whole_units() -> None:
    full, short = blocks(), blocks(NVCNN)
    left_out = [name for name in full if name not in short]
    assert len(left_out) == 5 + 10 + 5
    assert list(short) == [name for name in full if name not in left_out]
    assert size(*short.values()) == 55_843_464 - size(*(full[name] for name in left_out)) == 33_782_664


def test_units_are_scaled_by_stage_and_the_last_is_not() -> None:
    scales = {name: unit.scale for name, unit in units(PUBLISHED).items()}
    assert {scales[f"stage1/unit{unit}"] for unit in range(1, 11)} == {0.17}
    assert {scales[f"stage2/unit{unit}"] for unit in range(1, 21)} == {0.1}
    assert {scales[f"stage3/unit{unit}"] for unit in range(1, 10)} == {0.2}
    assert scales["stage3/unit10"] == 1
    assert [unit.scale for unit in units(NVCNN).values()] == [0.2] * 19 + [1]


def test_only_the_last_unit_has_no_activation() -> None:
    assert [name for name, unit in units(PUBLISHED).items() if unit.last] == ["stage3/unit10"]
    assert [name for name, unit in units(NVCNN).items() if unit.last] == ["stage3/unit5"]


@pytest.mark.parametrize("last", [False, True])
def test_a_unit_adds_its_scaled_branch_to_the_picture(last: bool) -> None:
    unit = ScaledResidual(4, "1x1:3 | 1x3:2", 0.3, last, MAKE_NORM)
    x = torch.linspace(-1, 1, 4 * 25).reshape(1, 4, 5, 5)
    before = x.clone()
    expected = x + 0.3 * unit.conv(unit.mixed(x, None))
    assert (expected < 0).any()
    torch.testing.assert_close(unit(x, None), expected if last else expected.clamp(min=0))
    assert torch.equal(x, before)


def test_channels_and_classes_change_the_first_and_the_last_block_only() -> None:
    assert size(*blocks(channels=1).values()) == 55_843_464 - 2 * 9 * 32
    assert size(*blocks(classes=10).values()) == 55_843_464 - 990 * (1536 + 1)
    assert scores(107, channels=1, classes=10).shape == (2, 10)


def test_pictures_have_the_published_shapes() -> None:
    x, shapes = torch.empty(1, 3, 299, 299, device="meta"), {}
    for name, block in blocks().items():
        x = block(x, None)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["stem/conv3"] == (64, 73, 73)
    assert shapes["stem/conv5"] == (192, 35, 35)
    assert shapes["mixed5b"] == shapes["stage1/unit10"] == (320, 35, 35)
    assert shapes["reduction1"] == shapes["stage2/unit20"] == (1088, 17, 17)
    assert shapes["reduction2"] == shapes["stage3/unit10"] == (2080, 8, 8)
    assert shapes["top"] == (1536, 8, 8)


def test_the_smallest_side_is_75() -> None:
    assert scores(75).shape == (2, 1000)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        scores(74)


def test_norms_have_the_published_epsilon() -> None:
    parts = Network(OrderedDict(blocks())).modules()
    assert {part.epsilon for part in parts if isinstance(part, BatchNormAct)} == {0.001}


def test_dropout_stands_before_the_last_dense_layer() -> None:
    head = blocks(PUBLISHED.model_copy(update={"dropout": 0.2}))["head"]
    assert isinstance(head, Head)
    assert isinstance(head.dropout, Dropout)
    assert (head.dropout.rate, head.dropout.features) == (0.2, 1536)
