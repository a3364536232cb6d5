"""Proxy norm: its formula, what it is for, what it learns, and where it is refused."""

from __future__ import annotations

from statistics import NormalDist
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import Paceline, make_plan
from paceline import keyed
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError
from paceline.model.build import build_network
from paceline.model.init import initialize, published
from paceline.model.norm import QUANTILES, GroupNormAct, ProxyNormAct
from paceline.model.whole import Whole
from paceline.settings.model import Activation
from paceline.world import World

CHANNELS, GROUPS, EPSILON, PROXY_EPSILON = 6, 3, 1e-4, 0.03
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
PROXY = ("norm=group", "norm.proxy=true")


def numbers(name: str, *shape: int) -> Tensor:
    """Keyed normal numbers in float64."""
    return torch.from_numpy(keyed.normals(keyed.key(0, name), torch.Size(shape).numel())).view(shape)


def activate(name: Activation | None, x: Tensor) -> Tensor:
    """Activations by their formulas."""
    match name:
        case None:
            return x
        case "relu":
            return x.clamp(min=0)
        case "relu6":
            return x.clamp(0, 6)
        case "silu":
            return x / (1 + (-x).exp())
        case "hardswish":
            return x * (x + 3).clamp(0, 6) / 6


def make_norm(activation: Activation | None) -> ProxyNormAct:
    """A norm in float64 whose scales, shifts and proxy are its own."""
    norm = ProxyNormAct(CHANNELS, GROUPS, EPSILON, PROXY_EPSILON, activation).double()
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(numbers(name, CHANNELS) * 0.3 + (1 if name == "weight" else 0.2))
    return norm


def by_hand(norm: ProxyNormAct, x: Tensor, gaussian: Tensor) -> Tensor:
    """Group norm, activation, then off with the mean and spread that a Gaussian has behind the same two."""
    groups = x.reshape(len(x), GROUPS, -1)
    var = groups.square().mean(2, keepdim=True) - groups.mean(2, keepdim=True) ** 2
    y = ((groups - groups.mean(2, keepdim=True)) / (var + EPSILON) ** 0.5).reshape(x.shape)
    columns = []
    for c in range(CHANNELS):
        channel = activate(norm.activation, y[:, c] * norm.weight[c] + norm.bias[c])
        proxy = gaussian * (1 + norm.proxy_weight[c]) + norm.proxy_bias[c]
        behind = activate(norm.activation, proxy * norm.weight[c] + norm.bias[c])
        mean = behind.mean()
        columns.append((channel - mean) / ((behind - mean).square().mean() + PROXY_EPSILON) ** 0.5)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_proxy_norm_is_its_formula_in_values_and_gradients(activation: Activation) -> None:
    norm = make_norm(activation)
    x = (numbers("x", 3, CHANNELS, 4, 5) * 1.7 + 0.4).requires_grad_()
    ours, theirs = norm(x, None), by_hand(norm, x, norm.quantiles)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    wanted = [x, *norm.parameters()]
    weights = numbers("weights", *ours.shape)
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), wanted) for y in (ours, theirs)), strict=True)
    for mine, other in pairs:
        assert torch.allclose(mine, other, rtol=1e-8, atol=1e-9)
        assert mine.any()


def test_the_gaussian_is_200_quantiles_of_equal_weight() -> None:
    expected = [NormalDist().inv_cdf((n + 0.5) / QUANTILES) for n in range(QUANTILES)]
    assert len(expected) == 200
    assert make_norm("relu").quantiles.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_quantiles_stand_for_a_large_gaussian_sample(activation: Activation) -> None:
    norm = make_norm(activation)
    x = numbers("x", 2, CHANNELS, 3, 3)
    assert torch.allclose(norm(x, None), by_hand(norm, x, numbers("gaussian", 200_000)), atol=0.03)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gaussian_comes_out_with_mean_0_and_spread_1_but_for_epsilon(activation: Activation) -> None:
    norm = ProxyNormAct(2, 1, 1e-5, 1e-6, activation).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.7, 1.5]))
        norm.bias.copy_(torch.tensor([-0.5, 0.8]))
        y = norm(numbers("gaussian", 4, 2, 200, 200) * 3 + 5, None)
        plain = GroupNormAct(2, 1, 1e-5, activation).double()
        plain.load_state_dict(norm.state_dict(), strict=False)
        without = plain(numbers("gaussian", 4, 2, 200, 200) * 3 + 5, None)
    assert y.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=0.02)
    assert y.std((0, 2, 3)).tolist() == pytest.approx([1, 1], abs=0.02)
    assert float(without.mean((0, 2, 3)).abs().max()) > 0.3  # which a norm alone does not do


def test_it_starts_from_a_standard_gaussian() -> None:
    norm = ProxyNormAct(CHANNELS, GROUPS, EPSILON, PROXY_EPSILON).double()
    initialize(norm, make_plan().recipe.init, 0)
    x = numbers("x", 2, CHANNELS, 3, 3)
    behind = norm.quantiles.clamp(min=0)
    expected = (F.relu(F.group_norm(x, GROUPS, eps=EPSILON)) - behind.mean()) / (
        behind.var(correction=0) + PROXY_EPSILON
    ).sqrt()
    assert torch.allclose(norm(x, None), expected, rtol=1e-12, atol=1e-12)


def test_without_an_activation_it_only_scales() -> None:
    norm = make_norm(None)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert list(norm.state_dict()) == ["weight"]
    x, shortcut = numbers("x", 2, CHANNELS, 3, 3), numbers("shortcut", 2, CHANNELS, 3, 3)
    expected = F.group_norm(x, GROUPS, eps=EPSILON) * norm.weight[:, None, None]
    assert torch.allclose(norm(x, None), expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(norm(x, None, shortcut), expected + shortcut, rtol=1e-12, atol=1e-12)


def test_the_quantiles_are_no_weights() -> None:
    assert set(make_norm("relu").state_dict()) == {"weight", "bias", "proxy_weight", "proxy_bias"}


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
def test_it_has_shapes_on_the_meta_device(activation: Activation | None) -> None:
    with torch.device("meta"):
        norm = ProxyNormAct(CHANNELS, GROUPS, EPSILON, PROXY_EPSILON, activation)
        made = norm(torch.empty(2, CHANNELS, 3, 3), None)
    assert made.device.type == "meta"
    assert made.shape == (2, CHANNELS, 3, 3)


def test_half_width_arithmetic_changes_rounding_only() -> None:
    norm = make_norm("relu").float()
    with torch.autocast("cpu", torch.bfloat16):
        made = norm(numbers("x", 2, CHANNELS, 3, 3).to(torch.bfloat16), None)
    exact = make_norm("relu")(numbers("x", 2, CHANNELS, 3, 3), None)
    assert torch.allclose(made.double(), exact, atol=0.05)


def norms(module: nn.Module) -> list[ProxyNormAct]:
    return [part for part in module.modules() if isinstance(part, ProxyNormAct)]


@pytest.mark.parametrize(
    "words",
    [("model=vgg11-bn", "model.head=mean", "data.side=32"), ("model=efficientnet-cifar", "data.side=16"),
     ("model=mobilenet-v3-small", "data.side=32"), ("model=googlenet", "data.side=16")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_every_proxy_of_a_network_learns(words: tuple[str, ...]) -> None:
    plan = make_plan(*words, *PROXY, "norm.groups=4", "global_batch=4", "on.micro_batch=4")
    world = World(torch.device("cpu"))
    whole = Whole(plan, world)
    if words[0] != "model=googlenet":  # large: torch's own weights do
        initialize(whole.module, published(plan.recipe.init, plan.recipe.model), 0)
    whole.forward_backward(next(open_loader(plan, None, 0, world.device).training(0)))
    found = [norm for norm in norms(whole.module) if norm.activation]
    assert found
    for norm in found:
        for parameter in (norm.proxy_weight, norm.proxy_bias):
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
            assert parameter.grad.any()


@pytest.mark.parametrize(
    ("model", "side"),
    [("alexnet", 64), ("vgg16", 32), ("vgg19-bn", 32), ("googlenet", 32), ("inception-v3", 299), ("inception-v4", 75),
     ("inception-resnet-v2", 75), ("efficientnet-b0", 32), ("efficientnet-cifar", 8), ("mobilenet-v2", 32),
     ("mobilenet-v3-large", 32)],
)  # fmt: skip
def test_every_family_whose_activations_follow_their_norms_takes_it(model: str, side: int) -> None:
    plan = make_plan(f"model={model}", f"data.side={side}", *PROXY)
    with torch.device("meta"):
        network = build_network(plan.recipe, plan.facts).eval()
        assert network(torch.empty(2, 3, side, side)).shape == (2, 10)
    if model not in ("alexnet", "vgg16"):  # which have no norms
        assert any(norm.activation for norm in norms(network))


@pytest.mark.parametrize(
    "model",
    ["resnet8", "resnet56-bottleneck", "resnet18", "resnet50", "resnext29", "resnext50", "timm:x", "torchvision:x"],
)
def test_networks_that_add_a_shortcut_before_the_activation_and_outside_ones_are_refused(model: str) -> None:
    make_plan(f"model={model}", "data.side=32", "norm=group")  # the norm itself is not in the way
    with pytest.raises(PlanError) as found:
        make_plan(f"model={model}", "data.side=32", *PROXY)
    message = str(found.value)
    assert message.startswith("norm.proxy needs activations that follow their norms directly, as in ")
    assert all(family in message for family in ("VGG", "GoogLeNet", "Inception", "EfficientNet", "MobileNet"))
    assert f"{model.partition(':')[0]} is none of them" in message
    assert "\n" not in message


def test_the_refusal_comes_before_torch_is_loaded(paceline: Paceline) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"  # an import of torch would now fail
        "from paceline.cli import main; main()"
    )
    found = paceline("train", "shapes/resnet8", *PROXY, program=program)
    assert found.returncode == 2
    assert found.stderr.startswith("error: norm.proxy needs activations")
    assert len(found.stderr.splitlines()) == 1
