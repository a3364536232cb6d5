"""A folded network gives what the network itself gives in evaluation, and leaves it as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottleneck_cases import distance
from conftest import make_plan
from paceline.model.folded import FoldedNetwork
from paceline.model.norm import BatchNormAct
from paceline.model.whole import Whole
from paceline.world import World

WORLD = World(torch.device("cpu"))


def evaluated(model: str, side: int) -> tuple[Whole, Tensor]:
    """A network in evaluation whose norms have seen something, and images for it."""
    plan = make_plan(f"model={model}", f"data.side={side}", "norm_batch=16", "on.precision=fp64", "on.kernels=fused")
    whole = Whole(plan, WORLD)
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.module.parameters():
        parameter.data.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    for norm in whole.module.modules():
        if isinstance(norm, BatchNormAct):
            for values in (norm.weight.data, norm.running_var):
                values.copy_(torch.rand(values.shape, generator=generator) + 0.5)
            for values in (norm.bias.data, norm.running_mean):
                values.copy_(torch.randn(values.shape, generator=generator) / 8)
    whole.module.eval()
    return whole, torch.randn(2, 3, side, side, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "side"),
    [
        ("resnet8", 16),
        ("resnet11-bottleneck", 16),
        ("{name: resnet18, blur: true}", 32),
        ("{name: efficientnet-b0, padding: same}", 32),
        ("mobilenet-v3-small", 32),
        ("googlenet", 32),
    ],
)
@torch.inference_mode()
def test_a_folded_network_gives_the_same_scores(model: str, side: int) -> None:
    whole, images = evaluated(model, side)
    folded = FoldedNetwork(whole.module, torch.float64)
    scores = whole.module(images)
    assert distance(folded(images), scores) < 1e-12
    assert torch.equal(whole.module(images), scores)


@torch.inference_mode()
def test_a_folded_network_keeps_the_weights_it_was_made_of() -> None:
    whole, images = evaluated("resnet8", 16)
    folded = FoldedNetwork(whole.module, torch.float64)
    before = folded(images)
    for norm in whole.module.modules():
        if isinstance(norm, BatchNormAct):
            norm.running_mean.add_(1)
    assert torch.equal(folded(images), before)
    assert not torch.allclose(FoldedNetwork(whole.module, torch.float64)(images), before)


def test_a_network_is_not_folded_outside_of_a_pass() -> None:
    whole, images = evaluated("resnet8", 16)
    with torch.inference_mode():
        FoldedNetwork(whole.module, torch.float64)(images)
    assert all(norm.folded is None for norm in whole.module.modules() if isinstance(norm, BatchNormAct))
    assert all(isinstance(weight, torch.nn.Parameter) for weight in whole.module.parameters())
    assert torch.autograd.grad(whole.module(images).sum(), whole.parameters)[0].any()  # as a heatmap needs it
