"""VGG: the published sizes, blocks in order, norms only where the name says so, and both heads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from paceline.model.dropout import Dropout
from paceline.model.layers import MakeNorm
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct, GroupNormAct, NormAct
from paceline.model.vgg import vgg_blocks
from paceline.settings.model import Vgg
from paceline.settings.recipe import BatchNorm, GroupNorm

BATCH = MakeNorm(BatchNorm(name="batch"))
PARAMETERS = {
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11-bn": 132_868_840,
    "vgg13-bn": 133_053_736,
    "vgg16-bn": 138_365_992,
    "vgg19-bn": 143_678_248,
}
CONVOLUTIONS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}


def network(name: str, classes: int = 1000, channels: int = 3, make_norm: MakeNorm = BATCH, **settings: Any) -> Network:
    """A network that has shapes but no memory."""
    model = Vgg.model_validate({"name": name, **settings})
    with torch.device("meta"):
        return Network(OrderedDict(vgg_blocks(model, channels, classes, make_norm)))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def drops(network: Network) -> dict[str, tuple[float, int]]:
    """Every dropout that drops something: its share and its features."""
    parts = dict(network.named_modules())
    return {name: (part.rate, part.features) for name, part in parts.items() if isinstance(part, Dropout) and part.rate}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_networks_have_torchvision_s_number_of_parameters(name: str, parameters: int) -> None:
    assert size(network(name)) == parameters


def test_other_classes_and_channels_change_the_first_and_the_last_layer_alone() -> None:
    assert size(network("vgg11")) - size(network("vgg11", classes=10)) == 990 * 4097
    assert size(network("vgg11", channels=4)) - size(network("vgg11")) == 64 * 9


@pytest.mark.parametrize("name", PARAMETERS)
def test_blocks_stand_in_order(name: str) -> None:
    depths = CONVOLUTIONS[name.removesuffix("-bn")]
    convolutions = [f"stage{stage}/conv{c + 1}" for stage, depth in enumerate(depths, 1) for c in range(depth)]
    assert list(network(name)._modules) == [*convolutions, "dense1", "dense2", "head"]
    assert list(network(name, head="mean")._modules) == [*convolutions, "head"]


def test_the_last_convolution_of_a_stage_halves_the_picture() -> None:
    x, shapes = torch.empty(2, 3, 224, 224, device="meta"), {}
    for name, block in network("vgg16", dropout=0).named_children():
        x = block(x, None)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["stage1/conv1"] == (64, 224, 224)
    assert shapes["stage1/conv2"] == (64, 112, 112)
    assert shapes["stage3/conv2"] == (256, 56, 56)
    assert shapes["stage3/conv3"] == (256, 28, 28)
    assert shapes["stage5/conv3"] == (512, 7, 7)
    assert (shapes["dense1"], shapes["dense2"], shapes["head"]) == ((4096,), (4096,), (1000,))


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
def test_only_names_with_bn_have_norms_and_one_after_each_convolution(depth: int) -> None:
    norms = [part for part in network(f"vgg{depth}-bn").modules() if isinstance(part, NormAct)]
    assert len(norms) == depth - 3
    assert all(isinstance(norm, BatchNormAct) and norm.activation == "relu" for norm in norms)
    assert not any(isinstance(part, NormAct) for part in network(f"vgg{depth}").modules())


def test_the_norm_is_the_recipe_s() -> None:
    groups = network("vgg11-bn", make_norm=MakeNorm(GroupNorm(name="group", groups=16)))
    assert sum(isinstance(part, GroupNormAct) for part in groups.modules()) == 8


def test_convolutions_keep_their_bias_before_a_norm() -> None:
    tensors = [name.removeprefix("stage1/conv1.") for name in network("vgg11-bn").state_dict()][:6]
    assert tensors == [
        *("conv.weight", "conv.bias"),
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    ]


def test_features_are_dropped_before_the_last_dense_layers() -> None:
    assert drops(network("vgg11", dropout=0.25)) == {"dense2.dropout": (0.25, 4096), "head.dropout": (0.25, 4096)}
    assert drops(network("vgg11", head="mean")) == {"head.dropout": (0.5, 512)}


def test_the_mean_head_is_one_dense_layer() -> None:
    assert size(network("vgg16-bn", 10, head="mean")) == 14_728_266
    assert size(network("vgg16", 10, head="mean").get_submodule("head")) == 5_130


@pytest.mark.parametrize("head", ["dense", "mean"])
@pytest.mark.parametrize("side", [32, 63, 224, 250])
def test_sides_from_32_work_with_both_heads(head: str, side: int) -> None:
    scores = network("vgg11-bn", 7, 1, head=head).eval()(torch.empty(2, 1, side, side, device="meta"))
    assert scores.shape == (2, 7)


def test_a_side_of_31_is_too_small() -> None:
    with pytest.raises(RuntimeError, match="too small"):
        network("vgg11", head="mean").eval()(torch.empty(2, 3, 31, 31, device="meta"))


def test_the_mean_head_learns_in_every_layer() -> None:
    blocks = vgg_blocks(Vgg(name="vgg11", head="mean", dropout=0), 3, 10, BATCH)
    network = Network(OrderedDict(blocks))
    x = torch.linspace(-1, 1, 2 * 3 * 32 * 32).mul(40).sin().reshape(2, 3, 32, 32)
    network(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in network.parameters())
