"""Residual networks: the sizes that are published, strides and shortcuts where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import make_recipe
from paceline.facts import DataFacts
from paceline.model.build import build_network
from paceline.model.layers import BlurredConv, conv
from paceline.model.resnet import ResidualUnit

PLAIN = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet14": 10_064_936,
    "resnet26": 15_995_176,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
FIRST_PROJECTION = {  # TensorFlow's: basic networks have one projection more, bottlenecks have it anyway
    "resnet10": 5_423_016,
    "resnet18": 11_693_736,
    "resnet34": 21_801_896,
    "resnet14": 10_064_936,
    "resnet26": 15_995_176,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
CIFAR = {
    "resnet8": 75_290,
    "resnet14-cifar": 172_506,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet56-bottleneck": 591_322,
}


def network(name: str, classes: int, side: int, *words: str, channels: int = 3) -> nn.Sequential:
    """A network that has shapes but no memory."""
    recipe = make_recipe(f"model={name}", *words)
    with torch.device("meta"):
        return build_network(recipe, DataFacts(1, 1, classes, side, channels))


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "parameters"), PLAIN.items())
def test_imagenet_networks_have_torchvision_s_number_of_parameters(name: str, parameters: int) -> None:
    assert size(network(name, 1000, 224)) == parameters


@pytest.mark.parametrize(("name", "parameters"), FIRST_PROJECTION.items())
def test_a_first_projection_gives_tensorflow_s_number_of_parameters(name: str, parameters: int) -> None:
    assert size(network(name, 1000, 224, "model.first_projection=true")) == parameters


@pytest.mark.parametrize(("name", "parameters"), CIFAR.items())
def test_narrow_networks_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert size(network(name, 10, 32)) == parameters


def test_a_hundred_classes_and_a_fourth_channel_add_what_they_should() -> None:
    assert size(network("resnet20", 100, 32)) - size(network("resnet20", 10, 32)) == 5_850
    assert size(network("resnet50", 1000, 224, channels=4)) - size(network("resnet50", 1000, 224)) == 49 * 64


def units(built: nn.Module) -> list[ResidualUnit]:
    return [part for part in built.modules() if isinstance(part, ResidualUnit)]


@pytest.mark.parametrize(("version", "first", "second"), [("v1", 2, 1), ("v1.5", 1, 2)])
def test_a_bottleneck_strides_where_its_version_says(version: str, first: int, second: int) -> None:
    built = network("resnet50", 10, 64, f"model.version={version}")
    by_name = dict(built.named_children())
    for stage in (2, 3, 4):
        unit = by_name[f"stage{stage}/unit1"]
        assert isinstance(unit, ResidualUnit)
        assert unit.conv1.stride == (first, first)
        assert unit.conv2.stride == (second, second)
        assert unit.projection.stride == (2, 2)
    for name, unit in by_name.items():
        if isinstance(unit, ResidualUnit) and (not name.endswith("unit1") or name == "stage1/unit1"):
            assert unit.conv1.stride == unit.conv2.stride == unit.conv3.stride == (1, 1)


def test_blocks_are_named_in_the_order_of_the_data() -> None:
    names = list(dict(network("resnet18", 10, 64).named_children()))
    stages = [f"stage{stage}/unit{unit}" for stage in (1, 2, 3, 4) for unit in (1, 2)]
    assert names == ["stem", *stages, "head"]


@pytest.mark.parametrize(
    ("name", "words", "projections"),
    [
        ("resnet20", (), 0),
        ("resnet20", ("model.shortcut=pad",), 0),
        ("resnet20", ("model.shortcut=projection",), 2),
        ("resnet29-bottleneck", (), 3),
        ("resnet29-bottleneck", ("model.shortcut=pad",), 0),
        ("resnet18", (), 3),
        ("resnet18", ("model.first_projection=true",), 4),
        ("resnet50", (), 4),
        ("resnet50", ("model.first_projection=true",), 4),
    ],
)
def test_shortcuts_project_where_they_should(name: str, words: tuple[str, ...], projections: int) -> None:
    built = network(name, 10, 32, *words)
    assert sum(unit.projects for unit in units(built)) == projections
    assert sum("projection" in dict(unit.named_children()) for unit in units(built)) == projections
    assert built.eval()(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


def test_a_padded_shortcut_is_a_strided_slice_with_zero_channels() -> None:
    recipe = make_recipe("model=resnet8", "norm=none")
    built = build_network(recipe, DataFacts(1, 1, 10, 8)).double()
    unit = dict(built.named_children())["stage2/unit1"]
    assert isinstance(unit, ResidualUnit)
    with torch.no_grad():
        for conv in (unit.conv1, unit.conv2):
            conv.weight.zero_()
    x = torch.arange(2 * 16 * 8 * 8, dtype=torch.float64).view(2, 16, 8, 8)
    y = unit(x, None)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 4, 4)
    assert not y[:, 16:].any()


@pytest.mark.parametrize(("stem", "side"), [("7x7", 16), ("3x3", 64)])
def test_the_stem_keeps_or_quarters_the_side(stem: str, side: int) -> None:
    built = network(f"{{name: resnet18, stem: {stem}}}", 10, 64).eval()
    first = dict(built.named_children())["stem"]
    assert first(torch.empty(1, 3, 64, 64, device="meta"), None).shape == (1, 64, side, side)


def reference(built: nn.Module, x: Tensor) -> Tensor:
    """A basic network of the tests written out by hand, from the same weights."""

    def norm(part: nn.Module, y: Tensor) -> Tensor:
        weight, bias = part.get_parameter("weight"), part.get_parameter("bias")
        return y * weight[:, None, None] + bias[:, None, None]

    blocks = dict(built.named_children())
    stem = blocks.pop("stem")
    head = blocks.pop("head")
    x = F.relu(norm(stem.get_submodule("norm"), F.conv2d(x, stem.get_parameter("conv.weight"), padding=1)))
    for name, unit in blocks.items():
        stride = 2 if name in ("stage2/unit1", "stage3/unit1") else 1
        y = F.conv2d(x, unit.get_parameter("conv1.weight"), stride=stride, padding=1)
        y = F.conv2d(F.relu(norm(unit.get_submodule("norm1"), y)), unit.get_parameter("conv2.weight"), padding=1)
        if stride == 2:
            x = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(x[:, :, ::2, ::2])], dim=1)
        x = F.relu(norm(unit.get_submodule("norm2"), y) + x)
    return F.linear(x.mean((2, 3)), head.get_parameter("dense.weight"), head.get_parameter("dense.bias"))


def test_a_small_network_computes_what_its_formula_says() -> None:
    recipe = make_recipe("model=resnet14-cifar", "norm=none")
    built = build_network(recipe, DataFacts(1, 1, 10, 8)).double()
    with torch.no_grad():
        for number, parameter in enumerate(built.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.1 * torch.sin(1 + number + 0.7 * values)).view_as(parameter))
    x = torch.sin(torch.arange(2 * 3 * 8 * 8, dtype=torch.float64)).view(2, 3, 8, 8)
    assert torch.allclose(built(x), reference(built, x), rtol=0, atol=1e-12)
    assert built(x).std() > 1e-3


def test_blurred_convolutions_see_weights_of_1_2_1_and_zeros_around() -> None:
    plain, blurred = (conv(16, 4, 3, 2, blur=blur).double() for blur in (False, True))
    blurred.load_state_dict(plain.state_dict())
    row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    weights = torch.outer(row, row).expand(16, 1, 3, 3)
    for side in (6, 7):
        x = torch.randn(2, 16, side, side, dtype=torch.float64)
        expected = plain(F.conv2d(x, weights, padding=1, groups=16))
        torch.testing.assert_close(blurred(x), expected, rtol=1e-12, atol=1e-12)


def test_blur_is_where_units_stride_and_nowhere_else() -> None:
    made = network("resnet50", 1000, 224, "model.blur=true")
    where = [name for name, part in made.named_modules() if isinstance(part, BlurredConv)]
    assert where == [f"stage{n}/unit1.{part}" for n in (2, 3, 4) for part in ("conv2", "projection")]
    assert made.state_dict().keys() == network("resnet50", 1000, 224).state_dict().keys()
    basic = network("resnet18", 1000, 224, "model.blur=true")
    assert sum(isinstance(part, BlurredConv) for part in basic.modules()) == 6
