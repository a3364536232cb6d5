"""AlexNet: the published size, its blocks in order, dropout where it belongs, and the sides that fit."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.model.alexnet import Convolution, PixelDense, alexnet_blocks
from paceline.model.dropout import Dropout
from paceline.model.layers import MakeNorm
from paceline.model.network import Network
from paceline.model.norm import NormAct
from paceline.settings.model import AlexNet
from paceline.settings.recipe import BatchNorm


def network(classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> Network:
    """A network that has shapes but no memory."""
    model = AlexNet(name="alexnet", dropout=dropout)
    with torch.device("meta"):
        return Network(OrderedDict(alexnet_blocks(model, channels, classes, MakeNorm(BatchNorm(name="batch")))))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_has_torchvision_s_number_of_parameters() -> None:
    assert size(network()) == 61_100_840


def test_other_classes_and_channels_change_the_first_and_the_last_layer_alone() -> None:
    assert size(network()) - size(network(classes=10)) == 990 * 4097
    assert size(network(channels=4)) - size(network()) == 64 * 11 * 11


def test_blocks_stand_in_order_and_every_layer_has_a_bias() -> None:
    blocks = ["conv1", "conv2", "conv3", "conv4", "conv5", "dense1", "dense2", "head"]
    layers = [f"{name}.{'conv' if name.startswith('conv') else 'dense'}" for name in blocks]
    assert list(network()._modules) == blocks
    assert list(network().state_dict()) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_there_are_no_norms() -> None:
    assert not any(isinstance(part, NormAct) for part in network().modules())


def test_pictures_shrink_as_published() -> None:
    x, shapes = torch.empty(2, 3, 224, 224, device="meta"), []
    for block in network(dropout=0):
        x = block(x, None)
        shapes.append(tuple(x.shape[1:]))
    pictures = [(64, 27, 27), (192, 13, 13), (384, 13, 13), (256, 13, 13), (256, 6, 6)]
    assert shapes == [*pictures, (4096,), (4096,), (1000,)]


def test_features_are_dropped_before_the_first_two_dense_layers() -> None:
    parts = dict(network(dropout=0.25).named_modules())
    drops = {
        name: (part.rate, part.features) for name, part in parts.items() if isinstance(part, Dropout) and part.rate
    }
    assert drops == {"dense1.dropout": (0.25, 9216), "dense2.dropout": (0.25, 4096)}


@pytest.mark.parametrize("side", [63, 128, 224, 257])
def test_sides_from_63_work(side: int) -> None:
    assert network(7, channels=1).eval()(torch.empty(2, 1, side, side, device="meta")).shape == (2, 7)


def test_a_side_of_62_is_too_small() -> None:
    with pytest.raises(RuntimeError, match="too small"):
        network().eval()(torch.empty(2, 3, 62, 62, device="meta"))


def test_a_convolution_activates_and_then_takes_the_largest_of_each_window() -> None:
    block = Convolution(nn.Conv2d(2, 4, 3), 3)
    x = torch.linspace(-1, 1, 2 * 9 * 9).sin().reshape(1, 2, 9, 9)
    assert torch.equal(block(x, None), F.max_pool2d(block.conv(x).relu(), 3, 2))
    assert block(x, None).shape == (1, 4, 3, 3)


def test_a_picture_of_another_side_is_averaged_to_the_side_of_the_dense_layer() -> None:
    block = PixelDense(channels=2, side=3, outputs=4, dropout=0)
    x = torch.arange(18.0).reshape(1, 2, 3, 3)
    larger = x.repeat_interleave(2, 2).repeat_interleave(2, 3) + torch.tensor([-1.0, 1.0]).repeat(3)
    torch.testing.assert_close(block(x, None), block.dense(x.flatten(1)).relu())
    torch.testing.assert_close(block(larger, None), block(x, None))
    torch.testing.assert_close(block(x[:, :, :1, :1], None), block(x[:, :, :1, :1].expand(1, 2, 3, 3), None))
