"""One network of each family on CUDA has the host's gradients in float64, in every form that its blocks can have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import make_plan
from paceline.data.load.loader import open_loader
from paceline.model.init import initialize, published
from paceline.model.whole import Whole
from paceline.world import World

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FAMILIES = {
    "alexnet": 63,
    "vgg11-bn": 32,
    "{name: resnet26, blur: true}": 64,
    "resnext26": 64,
    "googlenet": 64,
    "{name: inception-v3, auxiliary: 0}": 75,
    "inception-v4": 75,
    "inception-resnet-v2": 75,
    "efficientnet-b0": 64,
    "mobilenet-v3-small": 64,
}
"""Networks, and an image side that is large enough."""
HARD = 1e-6
"""How far torch's hard swish and hard sigmoid may be off on CUDA: they multiply by 1/6 in float32 whatever the type."""


def gradients(device: str, model: str, side: int, kernels: str) -> Tensor:
    """All gradients of one pass, from weights that the seed alone decides."""
    words = [f"model={model}", f"data.side={side}", f"on.device={device}", f"on.kernels={kernels}"]
    plan = make_plan(*words, "norm_batch=16", "on.micro_batch=16", "on.precision=fp64", "on.graphs=false")
    world, recipe = World(torch.device(device)), plan.recipe
    whole = Whole(plan, world)
    initialize(whole.module, published(recipe.init, recipe.model), recipe.seed)
    whole.forward_backward(next(open_loader(plan, None, 0, world.device).training(0)))
    return torch.cat([p.grad.flatten().cpu() for p in whole.parameters if p.grad is not None])


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize(("model", "side"), FAMILIES.items())
def test_a_pass_on_cuda_has_the_host_s_gradients(model: str, side: int, kernels: str) -> None:
    host, device = gradients("cpu", model, side, "plain"), gradients("cuda", model, side, kernels)
    limit = HARD if model.startswith("mobilenet-v3") else 1e-9
    assert float((device - host).norm() / host.norm()) < limit
