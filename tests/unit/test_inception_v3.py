"""Inception v3: torchvision's sizes and scores, a head on the way, and how small images may be."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch
from paceline.model.dropout import Dropout
from paceline.model.inception import inception_blocks
from paceline.model.layers import MakeNorm
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.settings.model import InceptionV3
from paceline.settings.recipe import BatchNorm, NoNorm

BATCH = MakeNorm(BatchNorm(name="batch"))
PASS = Batch(torch.empty(1, 0))
"""A training pass of a network without batch norms and dropouts."""
NONE = MakeNorm(NoNorm(name="none"))
PLAIN = InceptionV3(name="inception-v3", auxiliary=0, dropout=0)
WITH_HEAD = InceptionV3(name="inception-v3", dropout=0)
TORCHVISION_SCORES = [1.8702329154480564, 1.806008670987873, 1.0532452824426723, 0.37505657302478057]
"""What inception_v3 of torchvision 0.26 gives for the image of the test when it is filled in the same way."""


def network(model: InceptionV3, channels: int = 3, classes: int = 1000, make_norm: MakeNorm = BATCH) -> Network:
    """A network that has shapes but no memory."""
    with torch.device("meta"):
        return Network(OrderedDict(inception_blocks(model, channels, classes, make_norm)))


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


@pytest.mark.parametrize(("model", "parameters"), [(PLAIN, 23_834_568), (WITH_HEAD, 27_161_264)])
def test_it_has_torchvision_s_number_of_parameters(model: InceptionV3, parameters: int) -> None:
    assert size(network(model)) == parameters


def test_classes_and_channels_add_what_they_should() -> None:
    assert size(network(PLAIN, classes=1001)) - size(network(PLAIN)) == 2049
    assert size(network(WITH_HEAD, classes=1001)) - size(network(WITH_HEAD)) == 2049 + 769
    assert size(network(PLAIN, channels=4)) - size(network(PLAIN)) == 9 * 32
    assert network(WITH_HEAD, channels=1).eval()(images(80, channels=1)).shape == (2, 1000)


def test_blocks_are_named_in_the_order_of_the_data() -> None:
    stem = [f"stem/conv{number}" for number in (1, 2, 3, 4, 5)]
    mixed = [f"mixed{name}" for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e")]
    last = ["mixed7a", "mixed7b", "mixed7c", "head"]
    assert list(dict(network(WITH_HEAD).named_children())) == [*stem, *mixed, "aux", *last]
    assert list(dict(network(PLAIN).named_children())) == [*stem, *mixed, *last]


def test_a_pool_belongs_to_the_block_before_it() -> None:
    picture, shapes = images(299), []
    for block in list(network(PLAIN).eval())[:-1]:
        picture = block(picture, None)
        shapes.append((picture.shape[1], picture.shape[2]))
    widths = [32, 32, 64, 80, 192, 256, 288, 288, 768, 768, 768, 768, 768, 1280, 2048, 2048]
    sides = [149, 147, 73, 73, 35, 35, 35, 35, 17, 17, 17, 17, 17, 8, 8, 8]
    assert shapes == list(zip(widths, sides, strict=True))


def test_it_gives_torchvision_s_scores_from_the_same_weights() -> None:
    built = Network(OrderedDict(inception_blocks(WITH_HEAD, 3, 4, BATCH))).double().eval()
    fill(built)
    scores = built(torch.sin(torch.arange(3 * 107 * 107, dtype=torch.float64)).view(1, 3, 107, 107))
    assert scores.tolist() == [pytest.approx(TORCHVISION_SCORES, rel=1e-9)]


def test_norms_have_the_published_epsilon_unless_the_recipe_names_one() -> None:
    for settings, epsilon in ((BatchNorm(name="batch"), 0.001), (BatchNorm(name="batch", epsilon=0.5), 0.5)):
        norms = [m for m in network(WITH_HEAD, make_norm=MakeNorm(settings)).modules() if isinstance(m, BatchNormAct)]
        assert len(norms) == 96
        assert {(norm.epsilon, norm.momentum, norm.activation) for norm in norms} == {(epsilon, 0.1, "relu")}


def test_the_last_head_drops_the_share_that_its_setting_says() -> None:
    built = network(InceptionV3(name="inception-v3", dropout=0.3))
    assert [(m.rate, m.features) for m in built.modules() if isinstance(m, Dropout)] == [(0.3, 2048)]


def test_an_auxiliary_head_computes_what_its_formula_says() -> None:
    head = inception_blocks(WITH_HEAD, 3, 5, NONE)["aux"].double()
    fill(head)
    parts = iter(head.state_dict().values())

    def conv(y: Tensor) -> Tensor:
        return F.relu(F.conv2d(y, next(parts)) * next(parts)[:, None, None] + next(parts)[:, None, None])

    picture = wave(2, 768, 20, 20)
    expected = F.linear(conv(conv(F.avg_pool2d(picture, 5, 3))).mean((2, 3)), next(parts), next(parts))
    handed, scores = head(picture, PASS)
    assert handed is picture
    assert torch.allclose(scores, expected, rtol=1e-12)


def test_images_of_75_pixels_are_the_smallest_without_a_head_on_the_way() -> None:
    built = network(PLAIN, make_norm=NONE)
    assert built(images(75)).shape == (2, 1000)
    with pytest.raises(RuntimeError, match="greater than actual input size"):
        built(images(74))


def test_a_head_on_the_way_asks_for_299_pixels_in_training_and_nothing_in_evaluation() -> None:
    built = network(WITH_HEAD, make_norm=NONE)
    assert [scores.shape for scores in built(images(299), batch=PASS)] == [(2, 1000)] * 2
    with pytest.raises(RuntimeError, match="greater than actual input size"):
        built(images(298), batch=PASS)
    assert built(images(75)).shape == (2, 1000)
