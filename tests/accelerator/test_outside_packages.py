"""Real networks of timm and torchvision, where both packages are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import make_plan
from paceline.command.verify import LIMIT
from paceline.errors import PlanError
from paceline.model.build import build_network
from paceline.model.pretrained import load_weights, read_weights
from paceline.model.whole import Whole
from paceline.training.trials import Trial
from paceline.world import init_world

timm = pytest.importorskip("timm")
models = pytest.importorskip("torchvision.models")
pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize(
    "model",
    ["timm:resnet10t", "timm:efficientnet_lite0", "timm:convnext_atto", "torchvision:shufflenet_v2_x0_5",
     "torchvision:mobilenet_v3_small", "torchvision:regnet_y_400mf"],
)  # fmt: skip
def test_an_outside_network_takes_the_same_steps_on_two_layouts(tmp_path: Path, model: str) -> None:
    words = ["on.precision=fp64", f"model={model}", "data.side=64", "norm_batch=8", "optimizer.lr=0.0001"]
    trials = []
    for name in ("lead", "follow"):
        (tmp_path / name).mkdir()
        trials.append(Trial(tmp_path / name, None, 2))
    lead = trials[0].lead(make_plan(*words, "on.micro_batch=16"))
    found = trials[1].follow(make_plan(*words, "on.replicas=2", "on.micro_batch=4"), lead)
    print(f"{model}: amplification {lead.amplification:.2g} ({lead.amplified}), {found}")
    assert max(difference.judged for difference in found.values()) <= LIMIT, found


def test_published_names_that_do_not_exist_are_one_line() -> None:
    with pytest.raises(PlanError, match="timm:no_such_network: timm cannot make it"):
        Whole(make_plan("model=timm:no_such_network"), init_world(make_plan(), None))


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet:FutureWarning")
@pytest.mark.parametrize(
    ("model", "peer"),
    [("resnet18", "resnet18"), ("googlenet", "googlenet"), ("efficientnet-b0", "efficientnet_b0"),
     ("mobilenet-v3-large", "mobilenet_v3_large"), ("vgg11-bn", "vgg11_bn")],
)  # fmt: skip
def test_a_torchvision_file_fits_the_network_of_that_name_with_a_new_head(
    tmp_path: Path, model: str, peer: str
) -> None:
    torch.save(models.get_model(peer, weights=None).state_dict(), tmp_path / "peer.pth")
    plan = make_plan(f"model={model}", "data.side=64")
    whole = Whole(plan, init_world(plan, None))
    source = str(tmp_path / "peer.pth")
    loaded = load_weights(whole.module, read_weights(source), source)
    heads = {"aux1.dense", "aux2.dense", "head.dense"} if model == "googlenet" else {"head.dense"}
    assert {name.rpartition(".")[0] for name in loaded.initial} == heads


SORTED = [
    *((f"torchvision:{name}", name.replace("_", "-")) for name in (
        "alexnet", "vgg11_bn", "resnet18", "resnet50", "googlenet", "inception_v3", "efficientnet_b0", "mobilenet_v2",
        "mobilenet_v3_small", "mobilenet_v3_large",
    )),
    ("torchvision:resnext50_32x4d", "resnext50"), ("timm:resnet50", "resnet50"), ("timm:vgg11_bn", "vgg11-bn"),
    ("timm:efficientnet_b0", "efficientnet-b0"), ("timm:tf_efficientnet_lite0", "efficientnet-lite0"),
    ("timm:tf_efficientnet_lite4", "efficientnet-lite4"), ("timm:mobilenetv2_100", "mobilenet-v2"),
    ("timm:mobilenetv3_small_100", "mobilenet-v3-small"), ("timm:mobilenetv3_large_100", "mobilenet-v3-large"),
    ("timm:inception_v3", "inception-v3"), ("timm:inception_v4", "inception-v4"),
    ("timm:inception_resnet_v2", "inception-resnet-v2"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("peer", "model"), SORTED)
def test_a_safetensors_file_gives_what_a_file_in_the_order_of_the_network_gives(
    tmp_path: Path, peer: str, model: str
) -> None:
    package, _, name = peer.partition(":")
    made = timm.create_model(name) if package == "timm" else models.get_model(name, weights=None)
    for number, tensor in enumerate(made.state_dict().values()):
        if tensor.dim():
            tensor.copy_(torch.sin(number + torch.arange(tensor.numel())).view(tensor.shape))
    torch.save(made.state_dict(), tmp_path / "peer.pth")
    save_file({key: value.contiguous() for key, value in made.state_dict().items()}, tmp_path / "peer.safetensors")
    plan = make_plan(f"model={model}", "data=generated", "data.classes=1000", "data.side=299", "augment.pad=0")
    network = build_network(plan.recipe, plan.facts)
    found = []
    for file in ("peer.pth", "peer.safetensors"):
        for tensor in network.state_dict().values():
            tensor.zero_()
        loaded = load_weights(network, read_weights(str(tmp_path / file)), file)
        assert all("aux" in name for name in loaded.initial)
        found.append({name: value.clone() for name, value in network.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
