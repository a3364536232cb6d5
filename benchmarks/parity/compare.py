"""Every network against torchvision's or timm's of the same name, with the peer's weights, in float64.

    python benchmarks/parity/compare.py [--device cuda] [NAME ...]

Prints a table and ends with status 1 if parameters differ in number, or scores or input gradients by more than 1e-9 of
their largest value, in evaluation or in training (with nothing left to chance).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.facts import DataFacts
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.dropout import Dropout, StochasticDepth
from paceline.model.network import Network
from paceline.model.norm import Statistics
from paceline.model.pretrained import load_weights
from paceline.model.tables import MEMBERS
from paceline.settings.build import build
from paceline.settings.model import Model
from paceline.settings.read import parse
from paceline.settings.recipe import Recipe

LIMIT = 1e-9
IMAGES = 4
CLASSES = 1000

PEERS: list[tuple[str, str]] = [
    *((name, f"torchvision:{name.replace('-', '_')}") for name in (
        "alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "vgg11-bn", "vgg13-bn", "vgg16-bn", "vgg19-bn",
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "googlenet", "inception-v3",
        *(f"efficientnet-b{number}" for number in range(8)),
        "mobilenet-v2", "mobilenet-v3-small", "mobilenet-v3-large",
    )),
    ("resnext50", "torchvision:resnext50_32x4d"),
    ("{name: resnext101, group_width: 8}", "torchvision:resnext101_32x8d"),
    ("{name: resnext101, cardinality: 64}", "torchvision:resnext101_64x4d"),
    ("{name: googlenet, auxiliary: 0}", "torchvision:googlenet aux_logits=False"),
    ("{name: inception-v3, auxiliary: 0}", "torchvision:inception_v3 aux_logits=False"),
    ("{name: mobilenet-v2, width: 1.4}", "torchvision:mobilenet_v2 width_mult=1.4"),
    ("resnet26", "timm:resnet26"),
    ("resnext101", "timm:resnext101_32x4d"),
    ("inception-v4", "timm:inception_v4"),
    ("inception-resnet-v2", "timm:inception_resnet_v2"),
    ("resnet50", "timm:resnet50"),
    ("efficientnet-b0", "timm:efficientnet_b0"),
    *((f"efficientnet-lite{number}", f"timm:tf_efficientnet_lite{number}") for number in range(5)),
    ("{name: efficientnet-b0, padding: same}", "timm:tf_efficientnet_b0 bn_eps=1e-5"),
    ("mobilenet-v2", "timm:mobilenetv2_100"),
]  # fmt: skip
"""Our network and the peer's; words after a peer's name are arguments of its maker."""

COUNTS: dict[str, int] = {
    "{name: resnet10, first_projection: true}": 5_423_016,
    "{name: resnet18, first_projection: true}": 11_693_736,
    "{name: resnet34, first_projection: true}": 21_801_896,
    "resnet14": 10_064_936,
    "resnext14": 9_411_880,
    "resnext101": 44_177_704,
    "{name: efficientnet-b0, group_dim: 16, expand_ratio: 4}": 5_913_796,
    "{name: efficientnet-b4, group_dim: 16, expand_ratio: 4}": 19_328_168,
}
"""Networks that only the older systems have, with 1000 classes, and how many parameters they had there."""
CIFAR_COUNTS: dict[str, int] = {
    "resnet8": 75_290,
    "resnet14-cifar": 172_506,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet56-bottleneck": 591_322,
    "resnext29": 1_293_786,
    "efficientnet-cifar": 1_077_932,
    "{name: efficientnet-cifar, group_dim: 16, expand_ratio: 4}": 1_683_420,
}
"""The same for 10 classes."""


def main() -> int:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("names", nargs="*")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = words.parse_args()
    torch.backends.cudnn.benchmark = False
    print("| network | peer | parameters | evaluation: scores | input gradient | training: scores | input gradient |")
    print("|---|---|---|---|---|---|---|")
    good = True
    for ours, theirs in PEERS:
        if not asked.names or any(name in ours for name in asked.names):
            good &= compare(ours, theirs, torch.device(asked.device))
    if not asked.names:
        print("\n| network | classes | parameters | expected |\n|---|---|---|---|")
        for classes, table in ((1000, COUNTS), (10, CIFAR_COUNTS)):
            for ours, expected in table.items():
                with torch.device("meta"):
                    found = count(build_network(recipe(ours), DataFacts(1, 1, classes, 32)))
                good &= found == expected
                print(f"| {ours} | {classes} | {found:,} | {expected:,} |")
    print("\nall equal" if good else "\nDIFFERENT")
    return 0 if good else 1


def compare(ours: str, theirs: str, device: torch.device) -> bool:
    """One row of the table."""
    settings = recipe(ours)
    side = _side(settings.model)
    with torch.device(device):
        network = build_network(settings, DataFacts(1, 1, CLASSES, side)).double()
        peer = _peer(theirs).to(device).double()
    fill(peer)
    load_weights(network, dict(peer.state_dict()), theirs)
    parameters = count(network), count(peer)
    images = torch.randn(IMAGES, 3, side, side, dtype=torch.float64, device=device)
    cells, worst = [], 0.0
    for training in (False, True):
        _settle(network, peer, training)
        batch = Batch(Statistics(network, passes=1, groups=1).pass_rows(0)) if training else None
        for one, other in zip(run(partial(network, batch=batch), images), run(peer, images), strict=True):
            assert torch.stack([one, other]).isfinite().all(), (ours, theirs)
            difference = float((one - other).abs().max() / other.abs().max())
            worst = max(worst, difference)
            cells.append(f"{difference:.1e}" if difference else "0")
    same = parameters[0] == parameters[1]
    shown = f"{parameters[0]:,}" if same else f"{parameters[0]:,}, there {parameters[1]:,}"
    print(f"| {ours} | {theirs} | {shown} | {' | '.join(cells)} |", flush=True)
    return same and worst <= LIMIT


def run(network: Callable[[Tensor], Any], images: Tensor) -> tuple[Tensor, Tensor]:
    """All scores side by side, and the gradient of a fixed mixture of them with respect to the images."""
    given = images.clone().requires_grad_()
    made = network(given)
    scores = (
        [made] if isinstance(made, Tensor) else sorted((s for s in made if s is not None), key=lambda s: float(s.sum()))
    )
    row = torch.cat(scores, 1)
    mixture = torch.sin(torch.arange(CLASSES, dtype=row.dtype, device=row.device))
    torch.stack([(s * mixture).sum() for s in scores]).sum().backward()
    assert given.grad is not None
    return row.detach(), given.grad


@torch.no_grad()
def fill(network: nn.Module) -> None:
    """Random numbers of a size that keeps pictures alive, in every tensor, running statistics included."""
    torch.manual_seed(0)
    for name, tensor in network.state_dict().items():
        if not tensor.is_floating_point():
            continue
        numbers = torch.randn_like(tensor)
        if tensor.dim() > 1:
            tensor.copy_(numbers * (1.5 / tensor[0].numel()) ** 0.5)
        else:
            tensor.copy_(1 + 0.1 * numbers.tanh() if name.endswith(("weight", "var")) else 0.1 * numbers)


def recipe(model: str) -> Recipe:
    """A recipe with this model."""
    page = f"{{model: {model}, global_batch: 4, epochs: 1, optimizer: {{name: sgd, lr: 0.1}}, schedule: constant}}"
    return build(Recipe, parse(page, "parity"))


def count(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in network.parameters())


def _side(model: Model) -> int:
    native = next(row.side for row in MEMBERS if row.name == model.name)
    return native if native == 299 else 96


def _peer(words: str) -> nn.Module:
    source, *arguments = words.split()
    package, _, name = source.partition(":")
    given = parse("\n".join(each.lower().replace("=", ": ", 1) for each in arguments), "parity").values
    if package == "timm":
        import timm  # type: ignore[import-not-found]

        made = timm.create_model(name, num_classes=CLASSES, **given)
    else:
        from torchvision import models

        if name in ("googlenet", "inception_v3"):
            given["init_weights"] = False
        made = models.get_model(name, weights=None, num_classes=CLASSES, **given)
    assert isinstance(made, nn.Module)
    return made


def _settle(network: Network, peer: nn.Module, training: bool) -> None:
    """Both in the same mode, with nothing dropped."""
    network.train(training)
    peer.train(training)
    for part in peer.modules():
        for key in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(part, key, None), float):
                setattr(part, key, 0.0)
    for part in network.modules():
        if isinstance(part, Dropout | StochasticDepth):
            part.rate = 0.0


if __name__ == "__main__":
    sys.exit(main())
