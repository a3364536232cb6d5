"""Initial weights: their spread, the roles that start at zero, and that only seed and name decide them."""

from __future__ import annotations

import hashlib
import math
import typing
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import make_recipe
from paceline.facts import DataFacts
from paceline.model.build import build_network
from paceline.model.init import initialize, published
from paceline.model.norm import NormAct
from paceline.model.resnet import ResidualUnit
from paceline.settings import model
from paceline.settings.model import Model
from paceline.settings.recipe import Init

FACTS = DataFacts(1, 1, 10, 32)
GOLDEN = "236b53c0c0ddf15766ceeabc84d716f024fb6d083ab45bcfbd81a0a4e2c22f0b"


PUBLISHED: dict[type[Model], tuple[str, str, str]] = {
    model.AlexNet: ("alexnet", "uniform-fan-in", "uniform-fan-in"),
    model.Vgg: ("vgg11-bn", "he-fan-out", "normal-0.01"),
    model.ResNet: ("resnet18", "he-fan-out", "uniform-fan-in"),
    model.CifarResNet: ("resnet20", "he-fan-out", "uniform-fan-in"),
    model.ResNeXt: ("resnext50", "he-fan-out", "uniform-fan-in"),
    model.CifarResNeXt: ("resnext29", "he-fan-out", "uniform-fan-in"),
    model.GoogLeNet: ("googlenet", "normal-0.01", "normal-0.01"),
    model.InceptionV3: ("inception-v3", "normal-0.1", "normal-0.1"),
    model.InceptionV4: ("inception-v4", "uniform-fan-in", "uniform-fan-in"),
    model.InceptionResNetV2: ("inception-resnet-v2", "uniform-fan-in", "uniform-fan-in"),
    model.EfficientNet: ("efficientnet-b0", "he-fan-out", "uniform-fan-out"),
    model.MobileNetV2: ("mobilenet-v2", "he-fan-out", "normal-0.01"),
    model.MobileNetV3: ("mobilenet-v3-small", "he-fan-out", "normal-0.01"),
}
"""A network of each family, and how its convolutions and dense layers start."""
SPREADS: dict[str, Callable[[int, int], float]] = {
    "he-fan-out": lambda inputs, outputs: math.sqrt(2 / outputs),
    "uniform-fan-in": lambda inputs, outputs: math.sqrt(1 / 3 / inputs),
    "uniform-fan-out": lambda inputs, outputs: math.sqrt(1 / 3 / outputs),
    "normal-0.1": lambda inputs, outputs: 0.1,
    "normal-0.01": lambda inputs, outputs: 0.01,
}
"""Spread of the weights by the numbers that go into and come out of one place of a layer."""


def network(*words: str, seed: int = 0) -> nn.Sequential:
    recipe = make_recipe(*words)
    built = build_network(recipe, FACTS)
    initialize(built, published(recipe.init, recipe.model), seed)
    return built


@pytest.mark.parametrize(
    ("kind", "spread", "limit"),
    [
        ("he-mixed", math.sqrt(2 / (48 * 9)), None),
        ("uniform-fan-in", math.sqrt(1 / 3 / (32 * 9)), math.sqrt(3)),
        ("normal-0.1", 0.1, None),
        ("normal-0.01", 0.01, None),
        ("he-fan-out", math.sqrt(2 / (48 * 9)), None),
        ("he-fan-in", math.sqrt(2 / (32 * 9)), None),
        ("truncated-fan-in", math.sqrt(1 / (32 * 9)), 2 / 0.87962566103423978),
        ("glorot-uniform", math.sqrt(2 / (80 * 9)), math.sqrt(3)),
    ],
)
def test_convolutions_start_with_the_spread_of_their_kind(kind: str, spread: float, limit: float | None) -> None:
    conv = nn.Conv2d(32, 48, 3).double()
    initialize(conv, Init.model_validate({"conv": kind}), seed=0)
    weight = conv.weight.detach()
    close = 5 / math.sqrt(weight.numel())
    assert abs(weight.mean()) < close * spread
    assert weight.square().mean().sqrt() == pytest.approx(spread, rel=close)
    largest = float(weight.abs().max()) / spread
    assert largest > 3.5 if limit is None else 0.99 * limit < largest <= limit
    assert conv.bias is not None
    bias = conv.bias.detach().abs().max()
    assert 0.8 < bias * math.sqrt(32 * 9) <= 1 if kind == "uniform-fan-in" else bias == 0


@pytest.mark.parametrize(("groups", "fan"), [(1, 48 * 9), (16, 2 * 9), (2, 16 * 9)])
def test_mixed_he_goes_by_the_inputs_where_a_convolution_is_grouped(groups: int, fan: int) -> None:
    conv = nn.Conv2d(32, 48, 3, groups=groups)
    initialize(conv, Init(conv="he-mixed"), seed=0)
    weight = conv.weight.detach()
    assert weight.std() == pytest.approx(math.sqrt(2 / fan), rel=5 / math.sqrt(weight.numel()))


def large_enough(built: nn.Module, kind: type[nn.Module]) -> list[nn.Conv2d | nn.Linear]:
    """Layers with enough weights to tell their spread and few enough to make them quickly, in memory."""
    found: list[nn.Conv2d | nn.Linear] = [
        part for part in built.modules() if isinstance(part, nn.Conv2d | nn.Linear) and isinstance(part, kind)
    ]
    return [part.to_empty(device="cpu") for part in found if 1000 < part.weight.numel() < 5_000_000]


@pytest.mark.parametrize("family", PUBLISHED, ids=lambda family: family.__name__)
def test_every_family_starts_as_it_was_published(family: type[Model]) -> None:
    name, conv, dense = PUBLISHED[family]
    recipe = make_recipe(f"model={name}")
    assert isinstance(recipe.model, family)
    init = published(recipe.init, recipe.model)
    assert (init.conv, init.dense) == (conv, dense)
    with torch.device("meta"):
        built = build_network(recipe, DataFacts(1, 1, 100, 32))
    for kind, start in ((nn.Conv2d, conv), (nn.Linear, dense)):
        layers = large_enough(built, kind)
        biased = [part for part in layers if part.bias is not None]
        chosen = {id(part): part for part in (layers[0], layers[-1], *biased[:1], *biased[-1:])}
        for part in chosen.values():
            initialize(part, init, seed=0)
            outputs, inputs, *window = part.weight.shape
            spread = SPREADS[start](inputs * math.prod(window), outputs * math.prod(window))
            found = part.weight.detach().square().mean().sqrt()
            assert found == pytest.approx(spread, rel=5 / math.sqrt(part.weight.numel()))
            if part.bias is not None:
                limit = 1 / math.sqrt(inputs * math.prod(window))
                largest = part.bias.detach().abs().max()
                assert 0.5 * limit < largest <= limit if start == "uniform-fan-in" else largest == 0


def test_every_family_of_ours_is_in_the_table_of_starts() -> None:
    assert {*PUBLISHED, model.External} == set(typing.get_args(Model))


@pytest.mark.parametrize("name", [name for name, _, _ in PUBLISHED.values()])
def test_what_a_recipe_names_counts_before_what_was_published(name: str) -> None:
    recipe = make_recipe(f"model={name}", "init.conv=he-fan-in", "init.zero_gamma=residual")
    init = published(recipe.init, recipe.model)
    assert init.conv == "he-fan-in"
    assert init.dense == published(Init(), recipe.model).dense
    assert init.zero_gamma == "residual"
    assert published(Init(dense="glorot-uniform"), recipe.model).dense == "glorot-uniform"


@pytest.mark.parametrize(("name", "dense"), [("efficientnet-lite0", "normal-0.01"), ("resnet50", "uniform-fan-in")])
def test_a_new_head_beside_pretrained_weights_starts_small(name: str, dense: str) -> None:
    chosen = make_recipe(f"model={name}", "init.from=weights.pth")
    assert published(chosen.init, chosen.model).dense == dense
    chosen = make_recipe(f"model={name}", "init.from=weights.pth", "init.dense=uniform-fan-out")
    assert published(chosen.init, chosen.model).dense == "uniform-fan-out"


@pytest.mark.parametrize(
    ("kind", "spread", "limit", "random_bias"),
    [
        ("uniform-fan-in", 1 / math.sqrt(3 * 200), math.sqrt(3), True),
        ("glorot-uniform", math.sqrt(2 / 250), math.sqrt(3), False),
        ("uniform-fan-out", 1 / math.sqrt(3 * 50), math.sqrt(3), False),
        ("normal-0.1", 0.1, None, False),
        ("normal-0.01", 0.01, None, False),
    ],
)
def test_the_classifier_starts_with_the_spread_of_its_kind(
    kind: str, spread: float, limit: float | None, random_bias: bool
) -> None:
    dense = nn.Linear(200, 50).double()
    initialize(dense, Init.model_validate({"dense": kind}), seed=0)
    weight, bias = dense.weight.detach(), dense.bias.detach()
    assert weight.square().mean().sqrt() == pytest.approx(spread, rel=5 / math.sqrt(weight.numel()))
    largest = float(weight.abs().max()) / spread
    assert largest > 3 if limit is None else 0.99 * limit < largest <= limit
    assert bool(bias.any()) is random_bias
    assert float(bias.abs().max()) <= 1 / math.sqrt(200)


def test_weights_depend_on_their_name_and_not_on_what_else_the_network_has() -> None:
    small, large = network("model=resnet8"), network("model=resnet20")
    theirs = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, theirs[name])
    first, second = theirs["stage1/unit1.conv1.weight"], theirs["stage1/unit2.conv1.weight"]
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_weights_depend_on_the_seed() -> None:
    one, other = dict(network(seed=1).named_parameters()), dict(network(seed=2).named_parameters())
    for name in ("stem.conv.weight", "head.dense.weight", "head.dense.bias"):
        assert not torch.equal(one[name], other[name])


def test_weights_do_not_depend_on_torch_s_own_random_state_or_memory_order() -> None:
    one = network()
    other = build_network(make_recipe(), FACTS).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    initialize(other, published(make_recipe().init, make_recipe().model), 0)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])


def test_float32_weights_are_the_float64_ones_rounded() -> None:
    narrow, wide = network(), build_network(make_recipe(), FACTS).double()
    initialize(wide, published(make_recipe().init, make_recipe().model), 0)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, dict(wide.named_parameters())[name].float())


def test_initial_weights_do_not_change_between_versions() -> None:
    digest = hashlib.sha256()
    for name, parameter in network().named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == GOLDEN


@pytest.mark.parametrize(
    ("model", "kind", "branch", "projected", "projection"),
    [
        ("resnet26", "none", 1, 1, 1),
        ("resnet26", "residual", 0, 0, 1),
        ("resnet26", "identity", 0, 1, 1),
        ("resnet26", "one-branch", 0, 1, 0),
        ("resnet18", "residual", 0, 0, 1),
        ("resnet18", "one-branch", 0, 1, 0),
    ],
)
def test_zero_gamma_starts_the_norms_of_its_roles_at_zero(
    model: str, kind: str, branch: int, projected: int, projection: int
) -> None:
    recipe = make_recipe(f"model={model}", f"init.zero_gamma={kind}")
    with torch.device("meta"):
        built = build_network(recipe, FACTS)
    for part in built.modules():
        if isinstance(part, NormAct):
            part.to_empty(device="cpu")
            initialize(part, recipe.init, 0)
    units = [part for part in built.modules() if isinstance(part, ResidualUnit)]
    assert {unit.projects for unit in units} == {True, False}
    for unit in units:
        last = unit.norm3 if unit.bottleneck else unit.norm2
        assert torch.all(last.weight == (projected if unit.projects else branch))
        assert torch.all(unit.norm1.weight == 1)
        if unit.projects:
            assert torch.all(unit.projection_norm.weight == projection)
    assert all(torch.all(part.bias == 0) for part in built.modules() if isinstance(part, NormAct))
