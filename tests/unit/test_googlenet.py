"""GoogLeNet: torchvision's sizes and scores, branches that mean what their text says, heads on the way."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch, Chain
from paceline.model.dropout import Dropout
from paceline.model.inception import Auxiliary, Branches, googlenet_blocks
from paceline.model.layers import MakeNorm
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.settings.model import GoogLeNet
from paceline.settings.recipe import BatchNorm, NoNorm

BATCH = MakeNorm(BatchNorm(name="batch"))
NONE = MakeNorm(NoNorm(name="none"))
PASS = Batch(torch.empty(1, 0))
"""A training pass of a network without batch norms and dropouts."""
PLAIN = GoogLeNet(name="googlenet", auxiliary=0, dropout=0)
WITH_HEADS = GoogLeNet(name="googlenet", dropout=0, auxiliary_dropout=0)
TORCHVISION_SCORES = [0.7165031669421297, 0.6939975862601749, 0.8021508672278639, 0.9926384809480806]
"""What googlenet of torchvision 0.26 gives for the image of the test when it is filled in the same way."""


def network(model: GoogLeNet, channels: int = 3, classes: int = 1000, make_norm: MakeNorm = BATCH) -> Network:
    """A network that has shapes but no memory."""
    with torch.device("meta"):
        return Network(OrderedDict(googlenet_blocks(model, channels, classes, make_norm)))


def images(side: int, channels: int = 3) -> Tensor:
    return torch.empty(2, channels, side, side, device="meta")


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def wave(*shape: int, start: float = 0) -> Tensor:
    """Numbers that look like nothing in particular and are the same everywhere."""
    return torch.sin(start + 0.7 * torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).view(shape)


def fill(module: nn.Module) -> None:
    """Waves for every tensor, in the order in which weights are adopted; those of one axis are around 1."""
    with torch.no_grad():
        for number, tensor in enumerate(module.state_dict().values(), 1):
            values = wave(*tensor.shape, start=number)
            tensor.copy_(1 + values / 4 if tensor.dim() == 1 else values * tensor[0].numel() ** -0.5)


@pytest.mark.parametrize(("model", "parameters"), [(PLAIN, 6_624_904), (WITH_HEADS, 13_004_888)])
def test_it_has_torchvision_s_number_of_parameters(model: GoogLeNet, parameters: int) -> None:
    assert size(network(model)) == parameters


def test_classes_and_channels_add_what_they_should() -> None:
    assert size(network(PLAIN, classes=1001)) - size(network(PLAIN)) == 1025
    assert size(network(WITH_HEADS, classes=1001)) - size(network(WITH_HEADS)) == 3 * 1025
    assert size(network(PLAIN, channels=4)) - size(network(PLAIN)) == 49 * 64
    assert network(WITH_HEADS, channels=1).eval()(images(64, channels=1)).shape == (2, 1000)


def test_blocks_are_named_in_the_order_of_the_data() -> None:
    names = ["stem/conv1", "stem/conv2", "stem/conv3", "inception3a", "inception3b", "inception4a", "aux1"]
    names += ["inception4b", "inception4c", "inception4d", "aux2", "inception4e", "inception5a", "inception5b", "head"]
    assert list(dict(network(WITH_HEADS).named_children())) == names
    assert list(dict(network(PLAIN).named_children())) == [name for name in names if not name.startswith("aux")]


def test_a_pool_belongs_to_the_block_before_it() -> None:
    picture, shapes = images(224), []
    for block in list(network(PLAIN).eval())[:-1]:
        picture = block(picture, None)
        shapes.append((picture.shape[1], picture.shape[2]))
    widths = [64, 64, 192, 256, 480, 512, 512, 512, 528, 832, 832, 1024]
    sides = [56, 56, 28, 28, 14, 14, 14, 14, 14, 7, 7, 7]
    assert shapes == list(zip(widths, sides, strict=True))


def test_it_gives_torchvision_s_scores_from_the_same_weights() -> None:
    built = Network(OrderedDict(googlenet_blocks(PLAIN, 3, 4, BATCH))).double().eval()
    fill(built)
    scores = built(torch.sin(torch.arange(3 * 33 * 33, dtype=torch.float64)).view(1, 3, 33, 33))
    assert scores.tolist() == [pytest.approx(TORCHVISION_SCORES, rel=1e-9)]


def test_norms_have_the_published_epsilon_unless_the_recipe_names_one() -> None:
    for settings, epsilon in ((BatchNorm(name="batch"), 0.001), (BatchNorm(name="batch", epsilon=0.5), 0.5)):
        norms = [m for m in network(WITH_HEADS, make_norm=MakeNorm(settings)).modules() if isinstance(m, BatchNormAct)]
        assert len(norms) == 59
        assert {(norm.epsilon, norm.momentum, norm.activation) for norm in norms} == {(epsilon, 0.1, "relu")}


def test_each_head_drops_the_share_that_its_setting_says() -> None:
    built = network(GoogLeNet(name="googlenet", dropout=0.1, auxiliary_dropout=0.6))
    dropouts = [(m.rate, m.features) for m in built.modules() if isinstance(m, Dropout)]
    assert dropouts == [(0.6, 1024), (0.6, 1024), (0.1, 1024)]


def test_heads_on_the_way_give_scores_in_training_alone() -> None:
    built = network(WITH_HEADS, make_norm=NONE)
    assert [scores.shape for scores in built(images(64), batch=PASS)] == [(2, 1000)] * 3
    assert built(images(64)).shape == (2, 1000)
    assert network(PLAIN, make_norm=NONE)(images(64), batch=PASS).shape == (2, 1000)


def test_a_head_on_the_way_hands_on_the_very_picture() -> None:
    head = Auxiliary(Chain(nn.Flatten()), 12, 5)
    picture = torch.ones(2, 3, 2, 2)
    handed, scores = head(picture, PASS)
    assert handed is picture
    assert torch.equal(scores, head.dense(torch.ones(2, 12)))
    assert head(picture, None) is picture


def test_an_auxiliary_head_computes_what_its_formula_says() -> None:
    head = googlenet_blocks(WITH_HEADS, 3, 5, NONE)["aux1"].double()
    fill(head)
    squeeze, weight, bias, *dense = head.state_dict().values()
    picture = wave(2, 512, 14, 14)
    y = F.conv2d(F.adaptive_avg_pool2d(picture, 4), squeeze) * weight[:, None, None] + bias[:, None, None]
    expected = F.linear(F.relu(F.linear(F.relu(y).flatten(1), *dense[:2])), *dense[2:])
    assert torch.allclose(head(picture, PASS)[1], expected, rtol=1e-12)


@pytest.mark.parametrize("model", [PLAIN, WITH_HEADS])
def test_images_of_15_pixels_are_the_smallest(model: GoogLeNet) -> None:
    built = network(model, make_norm=NONE)
    scores = built(images(15), batch=PASS)
    assert (scores[0] if model.auxiliary else scores).shape == (2, 1000)
    with pytest.raises(RuntimeError, match="too small"):
        built(images(14), batch=PASS)


def test_branches_compute_what_their_text_says() -> None:
    branches = Branches("3x3/2:2 | 1x1:3 1x5:4 3x3/2:2 | max max/2 1x1:3 | mean 1x3+3x1:2 3x3/2:1", 3, NONE).double()
    fill(branches)
    parts = iter(branches.state_dict().values())

    def conv(y: Tensor, padding: tuple[int, int] = (0, 0), stride: int = 1) -> Tensor:
        y = F.conv2d(y, next(parts), stride=stride, padding=padding)
        return F.relu(y * next(parts)[:, None, None] + next(parts)[:, None, None])

    x = wave(2, 3, 7, 7)
    first = conv(x, stride=2)
    second = conv(conv(conv(x), padding=(0, 2)), stride=2)
    third = conv(F.max_pool2d(F.max_pool2d(x, 3, 1, 1), 3, 2))
    mean = F.avg_pool2d(x, 3, 1, 1)
    fourth = conv(torch.cat([conv(mean, padding=(0, 1)), conv(mean, padding=(1, 0))], 1), stride=2)
    expected = torch.cat([first, second, third, fourth], 1)
    assert torch.allclose(branches(x, None), expected, rtol=1e-12)
    assert branches.outputs == expected.shape[1] == 8
