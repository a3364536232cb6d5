"""EfficientNets: the published sizes, switches that do what they say, branches left out by chance."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import PlanError
from paceline.model.batch import Batch
from paceline.model.dropout import DropoutMasks
from paceline.model.layers import Head, MakeNorm, SameConv, conv
from paceline.model.mobile import InvertedUnit, SqueezeExcite, inverted_blocks
from paceline.model.mobile_tables import Squeeze, round_channels, shape
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct, NormAct, ProxyNormAct
from paceline.settings.model import EfficientNet
from paceline.settings.recipe import BatchNorm, GroupNorm, NoNorm

BATCH = MakeNorm(BatchNorm(name="batch"))
NONE = MakeNorm(NoNorm(name="none"))
MODIFIED: dict[str, Any] = {"group_dim": 16, "expand_ratio": 4}
SIZES: list[tuple[str, dict[str, Any], int, int]] = [
    ("b0", {}, 1000, 5_288_548),
    ("b1", {}, 1000, 7_794_184),
    ("b2", {}, 1000, 9_109_994),
    ("b3", {}, 1000, 12_233_232),
    ("b4", {}, 1000, 19_341_616),
    ("b5", {}, 1000, 30_389_784),
    ("b6", {}, 1000, 43_040_704),
    ("b7", {}, 1000, 66_347_960),
    ("lite0", {}, 1000, 4_652_008),
    ("lite1", {}, 1000, 5_416_680),
    ("lite2", {}, 1000, 6_092_072),
    ("lite3", {}, 1000, 8_197_096),
    ("lite4", {}, 1000, 13_006_568),
    ("cifar", {}, 10, 1_077_932),
    ("cifar", MODIFIED, 10, 1_683_420),
    ("b0", MODIFIED, 1000, 5_913_796),
    ("b4", MODIFIED, 1000, 19_328_168),
]


def settings(name: str, **switches: Any) -> EfficientNet:
    return EfficientNet.model_validate({"name": f"efficientnet-{name}", **switches})


def blocks(
    name: str, classes: int = 10, channels: int = 3, norm: MakeNorm = BATCH, **switches: Any
) -> dict[str, nn.Module]:
    """Blocks that have shapes but no memory."""
    with torch.device("meta"):
        return inverted_blocks(settings(name, **switches), channels, classes, norm)


def network(made: dict[str, nn.Module]) -> Network:
    return Network(OrderedDict(made))


def units(made: dict[str, nn.Module]) -> dict[str, InvertedUnit]:
    return {name: block for name, block in made.items() if isinstance(block, InvertedUnit)}


def size(made: dict[str, nn.Module]) -> int:
    return sum(parameter.numel() for block in made.values() for parameter in block.parameters())


def fill(module: nn.Module) -> None:
    """Numbers that are neither small nor all alike."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = torch.sin(1 + number + 0.7 * torch.arange(parameter.numel(), dtype=parameter.dtype))
            spread = 1.0 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            parameter.copy_((values * spread).view_as(parameter) + (1 if parameter.dim() == 1 else 0))


def picture(images: int, channels: int, side: int) -> Tensor:
    count = images * channels * side * side
    return torch.sin(torch.arange(count, dtype=torch.float64)).view(images, channels, side, side)


@pytest.mark.parametrize(("name", "switches", "classes", "parameters"), SIZES)
def test_networks_have_the_published_number_of_parameters(
    name: str, switches: dict[str, Any], classes: int, parameters: int
) -> None:
    assert size(blocks(name, classes, **switches)) == parameters


def test_a_fourth_channel_adds_a_window_for_each_channel_of_the_stem() -> None:
    assert size(blocks("b0", 1000, channels=4)) == 5_288_836
    assert size(blocks("b1", 1000, channels=4)) == 7_794_472


@pytest.mark.parametrize(("name", "count"), [("b0", 16), ("b7", 55), ("lite0", 16), ("lite4", 30)])
def test_the_shape_known_without_building_names_the_units_that_are_built(name: str, count: int) -> None:
    known = shape(settings(name))
    assert len(known.units) == count
    assert list(blocks(name)) == ["stem", *known.units, "top", "head"]


def test_blocks_are_named_in_the_order_of_the_data() -> None:
    counts = (1, 2, 2, 3, 3, 4, 1)
    stages = [f"stage{stage}/unit{unit + 1}" for stage, count in enumerate(counts, 1) for unit in range(count)]
    assert list(blocks("b0")) == ["stem", *stages, "top", "head"]


@pytest.mark.parametrize(("channels", "divisor", "rounded"), [(35.2, 8, 32), (11.2, 8, 16), (2, 8, 8), (18, 16, 32)])
def test_channels_are_rounded_without_losing_a_tenth(channels: float, divisor: int, rounded: int) -> None:
    assert round_channels(channels, divisor) == rounded


@pytest.mark.parametrize(("name", "last"), [("b0", 2), ("cifar", 8)])
def test_the_small_network_strides_less(name: str, last: int) -> None:
    made = network(blocks(name))[:-1].eval()
    assert made(torch.empty(1, 3, 64, 64, device="meta")).shape[2:] == (last, last)


@pytest.mark.parametrize("side", [1, 31, 33])
def test_pictures_of_any_side_give_scores(side: int) -> None:
    made = network(blocks("b0", 7, channels=2)).eval()
    assert made(torch.empty(2, 2, side, side, device="meta")).shape == (2, 7)


def test_width_depth_divisor_and_top_width_shape_the_network() -> None:
    known = shape(settings("b3", width=0.5, depth=2.0, divisor=4, top_width=100))
    outputs = [unit.outputs for name, unit in known.units.items() if name.endswith("unit1")]
    assert (known.stem, outputs, known.top) == (16, [8, 12, 20, 40, 56, 96, 160], 52)
    assert len(known.units) == 32
    assert shape(settings("b3", width=1.0, depth=1.0)).units == shape(settings("b0")).units


def test_expand_ratio_widens_every_stage_but_the_first() -> None:
    for name, unit in shape(settings("b0", expand_ratio=3)).units.items():
        assert unit.inside == unit.inputs * (1 if name.startswith("stage1/") else 3)


def group_widths(unit: InvertedUnit) -> list[int]:
    looks = [part for part in unit.modules() if isinstance(part, nn.Conv2d) and part.kernel_size != (1, 1)]
    return [part.in_channels // part.groups for part in looks]


def test_group_dim_is_the_width_of_each_group() -> None:
    for name, unit in units(blocks("b0", **MODIFIED)).items():
        assert group_widths(unit) == [16], name


def test_too_few_channels_for_two_groups_are_one_group_as_published() -> None:
    widths = {name: group_widths(unit) for name, unit in units(blocks("b4", **MODIFIED)).items()}
    assert widths.pop("stage1/unit2") == [24]
    assert all(width == [16] for width in widths.values())


def test_groups_that_do_not_fit_are_refused_with_what_to_write() -> None:
    with pytest.raises(PlanError, match=r"56 channels .* 3 groups of about 16; write model\.divisor=16"):
        blocks("b6", **MODIFIED)
    assert size(blocks("b6", divisor=16, **MODIFIED)) > 0


def test_squeeze_and_excite_takes_its_share_of_a_unit_s_input_or_is_left_out() -> None:
    for share in (0.25, 0.5):
        made = units(blocks("b0", squeeze_excite=share))
        widths = [
            p.squeeze.out_channels for unit in made.values() for p in unit.modules() if isinstance(p, SqueezeExcite)
        ]
        assert widths == [int(u.inputs * share) for u in shape(settings("b0")).units.values()]
    assert not any(isinstance(part, SqueezeExcite) for part in network(blocks("b0", squeeze_excite=0)).modules())


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_squeeze_and_excite_has_the_network_s_activation_and_a_sigmoid(activation: str) -> None:
    squeezes = [unit.squeeze for unit in shape(settings("b0", activation=activation)).units.values()]
    assert {(squeeze.activation, squeeze.gate) for squeeze in squeezes if squeeze} == {(activation, "sigmoid")}


def test_squeeze_and_excite_computes_what_its_formula_says() -> None:
    part = SqueezeExcite(6, Squeeze(3, "silu", "sigmoid")).double()
    fill(part)
    x = picture(2, 6, 5)
    squeezed = F.silu(F.linear(x.mean((2, 3)), part.squeeze.weight[:, :, 0, 0], part.squeeze.bias))
    scale = torch.sigmoid(F.linear(squeezed, part.excite.weight[:, :, 0, 0], part.excite.bias))
    assert torch.allclose(part(x), x * scale[:, :, None, None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_the_activation_is_everywhere_but_behind_projections(activation: str) -> None:
    made = blocks("b0", activation=activation)
    ends = [unit.norm for unit in units(made).values()]
    norms = [part for part in network(made).modules() if isinstance(part, NormAct)]
    assert {part.activation for part in norms if part not in ends} == {activation}
    assert {part.activation for part in ends} == {None}


@pytest.mark.parametrize(("name", "dropout", "rate"), [("b0", None, 0.2), ("b7", None, 0.5), ("b7", 0.0, 0.0)])
def test_dropout_is_what_the_name_stands_for_unless_told(name: str, dropout: float | None, rate: float) -> None:
    head = blocks(name, dropout=dropout)["head"]
    assert isinstance(head, Head)
    assert head.dropout.rate == rate


@pytest.mark.parametrize(("name", "epsilon", "momentum"), [("b4", 1e-5, 0.1), ("b5", 1e-3, 0.01), ("lite0", 1e-3, 0.1)])
def test_norms_have_the_published_numbers(name: str, epsilon: float, momentum: float) -> None:
    norms = [part for part in network(blocks(name)).modules() if isinstance(part, BatchNormAct)]
    assert {(part.epsilon, part.momentum) for part in norms} == {(epsilon, momentum)}


def test_lite_networks_have_one_stem_and_top_no_squeeze_and_excite_and_relu6() -> None:
    small, large = shape(settings("lite0")), shape(settings("lite4"))
    assert (small.stem, small.top) == (large.stem, large.top) == (32, 1280)
    for stage in ("stage1/", "stage7/"):
        assert [sum(name.startswith(stage) for name in known.units) for known in (small, large)] == [1, 1]
    assert not any(unit.squeeze for unit in large.units.values())
    assert {small.activation, *(unit.activation for unit in small.units.values())} == {"relu6"}
    assert shape(settings("lite0", squeeze_excite=0.25, activation="silu")).units == shape(settings("b0")).units


def strided(made: dict[str, nn.Module]) -> set[type[nn.Module]]:
    convs = [part for part in network(made).modules() if isinstance(part, nn.Conv2d)]
    return {type(part) for part in convs if part.stride != (1, 1)}


@pytest.mark.parametrize(
    ("name", "padding", "kind"),
    [("b0", None, nn.Conv2d), ("b0", "same", SameConv), ("lite0", None, SameConv), ("lite0", "symmetric", nn.Conv2d)],
)
def test_padding_is_what_the_name_stands_for_unless_told(name: str, padding: str | None, kind: type[nn.Module]) -> None:
    assert strided(blocks(name, padding=padding)) == {kind}


@pytest.mark.parametrize(("size", "side", "before"), [(3, 8, 0), (5, 8, 1), (3, 7, 1), (5, 7, 2), (3, 1, 1)])
def test_same_padding_puts_the_odd_zero_after_the_last_pixel(size: int, side: int, before: int) -> None:
    layer = conv(2, 3, size, 2, same=True).double()
    fill(layer)
    x = picture(1, 2, side)
    wide = F.conv2d(F.pad(x, [before, size, before, size]), layer.weight, stride=2)  # zeros enough after the picture
    kept = -(-side // 2)
    assert torch.allclose(layer(x), wide[:, :, :kept, :kept], rtol=0, atol=1e-12)
    assert layer(x).shape[2:] == (kept, kept)


def test_a_branch_ends_where_a_shortcut_is_added() -> None:
    for name, unit in units(blocks("b0")).items():
        repeated = not name.endswith("unit1")
        assert unit.identity == repeated
        assert unit.norm.role == ("branch" if repeated else "plain")


def test_later_units_are_left_out_more_often_and_only_where_a_shortcut_remains() -> None:
    for number, (name, unit) in enumerate(units(blocks("b0", survival=0.6)).items()):
        rate = None if unit.depth is None else unit.depth.rate
        assert rate == (None if name.endswith("unit1") else pytest.approx(0.4 * number / 16))
    assert all(unit.depth is None for unit in units(blocks("b0", survival=1)).values())


def small(**switches: Any) -> Network:
    made = inverted_blocks(settings("cifar", width=0.25, **switches), 3, 5, NONE)
    built = network(made).double()
    fill(built)
    return built


def test_a_branch_that_is_left_out_leaves_the_shortcut() -> None:
    built = small(survival=0.5)
    _, masks = DropoutMasks(built, 0, torch.float64)(torch.arange(2))
    unit = built.get_submodule("stage6/unit4")
    assert isinstance(unit, InvertedUnit)
    assert unit.depth is not None
    chosen = [torch.tensor([0.0, 2.0]) if index == unit.depth.index else mask for index, mask in enumerate(masks)]
    x = picture(2, 48, 4)
    y = unit(x, Batch(torch.empty(1, 0), (), tuple(chosen)))
    assert torch.equal(y[0], x[0])
    branch = unit.norm(unit.conv(unit.wide(x, None)), None)
    assert torch.allclose(y[1], x[1] + 2 * branch[1], rtol=0, atol=1e-12)
    assert branch.abs().max() > 1e-3


def test_chance_has_no_part_in_evaluation() -> None:
    certain, chancy = small(survival=1), small(survival=0.2, dropout=0.5)
    x = picture(4, 3, 8)
    batch = Batch(torch.empty(1, 0), *DropoutMasks(chancy, 0, torch.float64)(torch.arange(4)))
    assert not torch.allclose(chancy(x, batch=batch), certain(x))
    assert torch.allclose(chancy(x), certain(x), rtol=1e-12, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("proxy", [False, True])
def test_a_network_learns_with_group_norm_and_with_proxy_norm(proxy: bool) -> None:
    norm = MakeNorm(GroupNorm(name="group", groups=4, proxy=proxy))
    built = network(inverted_blocks(settings("b0", survival=1, dropout=0), 3, 5, norm))
    assert any(isinstance(part, ProxyNormAct) for part in built.modules()) == proxy
    fill(built)
    built(picture(2, 3, 32).float(), batch=Batch(torch.empty(1, 0))).square().sum().backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
