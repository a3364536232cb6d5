"""MobileNets: the published sizes, units and activations where they belong, the extra dense layer of v3."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.model.batch import Batch
from paceline.model.layers import Head, MakeNorm
from paceline.model.mobile import InvertedUnit, PooledDense, SqueezeExcite, inverted_blocks, mobilenet3_blocks
from paceline.model.mobile_tables import Squeeze, shape
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct, NormAct
from paceline.settings.model import MobileNetV2, MobileNetV3
from paceline.settings.recipe import BatchNorm, GroupNorm

V2, SMALL, LARGE = "mobilenet-v2", "mobilenet-v3-small", "mobilenet-v3-large"
BATCH = MakeNorm(BatchNorm(name="batch"))
SIZES = [
    (V2, 1.0, 3_504_872),
    (SMALL, 1.0, 2_542_856),
    (LARGE, 1.0, 5_483_032),
    (V2, 1.4, 6_108_776),
    (V2, 0.35, 1_677_128),
    (SMALL, 0.35, 558_744),
    (LARGE, 1.4, 9_989_328),
]
UNITS = {V2: (1, 2, 3, 4, 3, 3, 1), SMALL: (1, 2, 3, 2, 3), LARGE: (1, 2, 3, 4, 2, 3)}


def settings(name: str, width: float = 1.0, dropout: float = 0.2) -> MobileNetV2 | MobileNetV3:
    kind = MobileNetV2 if name == V2 else MobileNetV3
    return kind.model_validate({"name": name, "width": width, "dropout": dropout})


def build(model: MobileNetV2 | MobileNetV3, classes: int = 10, channels: int = 3, norm: MakeNorm = BATCH) -> Network:
    if isinstance(model, MobileNetV2):
        return Network(OrderedDict(inverted_blocks(model, channels, classes, norm)))
    return Network(OrderedDict(mobilenet3_blocks(model, channels, classes, norm)))


def network(name: str, width: float = 1.0, classes: int = 10, channels: int = 3) -> Network:
    """A network that has shapes but no memory."""
    with torch.device("meta"):
        return build(settings(name, width), classes, channels)


def units(built: nn.Module) -> list[InvertedUnit]:
    return [part for part in built.modules() if isinstance(part, InvertedUnit)]


@pytest.mark.parametrize(("name", "width", "parameters"), SIZES)
def test_networks_have_the_published_number_of_parameters(name: str, width: float, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in network(name, width, 1000).parameters()) == parameters


@pytest.mark.parametrize("name", [V2, SMALL, LARGE])
def test_blocks_are_named_in_the_order_of_the_data(name: str) -> None:
    stages = [f"stage{stage}/unit{unit + 1}" for stage, count in enumerate(UNITS[name], 1) for unit in range(count)]
    assert list(shape(settings(name)).units) == stages
    ends = ["top", "head"] if name == V2 else ["top", "dense1", "head"]
    assert list(dict(network(name).named_children())) == ["stem", *stages, *ends]


@pytest.mark.parametrize("name", [V2, SMALL, LARGE])
@pytest.mark.parametrize("side", [1, 33, 64])
def test_pictures_of_any_side_give_scores(name: str, side: int) -> None:
    built = network(name, classes=7, channels=2).eval()
    assert built(torch.empty(2, 2, side, side, device="meta")).shape == (2, 7)
    last = list(dict(built.named_children())).index("top")
    assert built[: last + 1](torch.empty(2, 2, side, side, device="meta")).shape[2] == -(-side // 32)


@pytest.mark.parametrize(
    ("name", "inside"), [(V2, {"relu6"}), (SMALL, {"relu", "hardswish"}), (LARGE, {"relu", "hardswish"})]
)
def test_every_network_has_the_activations_it_was_published_with(name: str, inside: set[str]) -> None:
    built = network(name)
    wide = [part for unit in units(built) for part in unit.wide.modules() if isinstance(part, NormAct)]
    assert {part.activation for part in wide} == inside
    assert {unit.norm.activation for unit in units(built)} == {None}
    ends = [built.get_submodule("stem.norm"), built.get_submodule("top.norm")]
    assert [part.activation for part in ends if isinstance(part, NormAct)] == [
        "relu6" if name == V2 else "hardswish"
    ] * 2


@pytest.mark.parametrize(("name", "stages"), [(V2, set()), (SMALL, {1, 3, 4, 5}), (LARGE, {3, 5, 6})])
def test_squeeze_and_excite_is_in_the_published_stages(name: str, stages: set[int]) -> None:
    for path, block in network(name).named_children():
        if isinstance(block, InvertedUnit):
            found = any(isinstance(part, SqueezeExcite) for part in block.modules())
            assert found == (int(path[len("stage")]) in stages), path


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_squeeze_and_excite_is_hard_throughout(name: str) -> None:
    squeezes = [unit.squeeze for unit in shape(settings(name)).units.values() if unit.squeeze]
    assert {(squeeze.activation, squeeze.gate) for squeeze in squeezes} == {("relu", "hardsigmoid")}


def test_a_hard_gate_computes_what_its_formula_says() -> None:
    part = SqueezeExcite(4, Squeeze(2, "relu", "hardsigmoid")).double()
    with torch.no_grad():
        for number, parameter in enumerate(part.parameters()):
            parameter.copy_(torch.sin(number + torch.arange(parameter.numel())).view_as(parameter) * 3)
    x = torch.cos(torch.arange(2 * 4 * 9, dtype=torch.float64)).view(2, 4, 3, 3) + 1
    squeezed = F.linear(x.mean((2, 3)), part.squeeze.weight.flatten(1), part.squeeze.bias).clamp(min=0)
    scale = (F.linear(squeezed, part.excite.weight.flatten(1), part.excite.bias) / 6 + 0.5).clamp(0, 1)
    assert scale.std() > 0.1
    assert torch.allclose(part(x), x * scale[:, :, None, None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [V2, SMALL, LARGE])
def test_shortcuts_are_where_shapes_agree_and_never_left_to_chance(name: str) -> None:
    for path, block in network(name).named_children():
        if isinstance(block, InvertedUnit):
            agrees = not path.endswith("unit1") or (name, path) == (LARGE, "stage1/unit1")
            assert block.identity == agrees, path
            assert block.norm.role == ("branch" if agrees else "plain")
            assert block.depth is None


def test_a_unit_adds_its_branch_to_its_input() -> None:
    unit = build(settings(V2, 0.35)).double().eval().get_submodule("stage2/unit2")
    assert isinstance(unit, InvertedUnit)
    x = torch.sin(torch.arange(2 * 8 * 16, dtype=torch.float64)).view(2, 8, 4, 4)
    branch = unit.norm(unit.conv(unit.wide(x, None)), None)
    assert branch.abs().max() > 1e-6
    assert torch.equal(unit(x, None), branch + x)


@pytest.mark.parametrize(("name", "epsilon", "momentum"), [(V2, 1e-5, 0.1), (SMALL, 1e-3, 0.01), (LARGE, 1e-3, 0.01)])
def test_norms_have_the_published_numbers(name: str, epsilon: float, momentum: float) -> None:
    norms = [part for part in network(name).modules() if isinstance(part, BatchNormAct)]
    assert {(part.epsilon, part.momentum) for part in norms} == {(epsilon, momentum)}


@pytest.mark.parametrize("name", [V2, SMALL])
def test_dropout_stands_before_the_last_dense_layer(name: str) -> None:
    head = build(settings(name, 0.35, 0.7)).get_submodule("head")
    assert isinstance(head, Head)
    assert (head.dropout.rate, head.dropout.features) == (0.7, head.dense.in_features)


def test_the_head_of_v3_has_a_dense_layer_with_hard_swish_before_the_last() -> None:
    built = build(settings(SMALL, 0.35), classes=5).double().eval()
    dense, head = built.get_submodule("dense1"), built.get_submodule("head")
    assert isinstance(dense, PooledDense)
    assert isinstance(head, Head)
    x = torch.sin(torch.arange(2 * dense.dense.in_features * 4, dtype=torch.float64)).view(2, -1, 2, 2)
    features = dense.dense(x.mean((2, 3)))
    features = features * (features + 3).clamp(0, 6) / 6
    assert torch.allclose(head(dense(x, None), None), head.dense(features), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [V2, LARGE])
@pytest.mark.parametrize("proxy", [False, True])
def test_a_network_learns_with_group_norm_and_with_proxy_norm(name: str, proxy: bool) -> None:
    norm = MakeNorm(GroupNorm(name="group", groups=4, proxy=proxy))
    built = build(settings(name, 0.35, 0), norm=norm).train()
    x = torch.sin(torch.arange(2 * 3 * 32 * 32, dtype=torch.float32)).view(2, 3, 32, 32)
    built(x, batch=Batch(torch.empty(1, 0))).square().sum().backward()
    for path, parameter in built.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
