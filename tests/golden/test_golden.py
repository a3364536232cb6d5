"""Every network gives the scores it always gave: those of one image, from weights that are the same everywhere.

The scores are in logits.json. When a network is meant to change, and only then, write them anew:

    python tests/golden/test_golden.py [NAME ...]

Before that, `python benchmarks/parity/compare.py` must find the changed networks equal to torchvision's and timm's, and
the change belongs under *Results changed* in CHANGELOG.md: weights trained before it no longer mean the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.facts import DataFacts
from paceline.model.build import build_network
from paceline.model.network import Network
from paceline.model.tables import MEMBERS, member, smallest_side
from paceline.settings.build import build
from paceline.settings.read import parse
from paceline.settings.recipe import Recipe

FILE = Path(__file__).parent / "logits.json"
CLASSES = 10
KEPT = 5
FAMILIES = (
    "alexnet", "vgg11-bn", "resnet10", "resnet8", "resnext14", "resnext11", "googlenet", "inception-v3",
    "inception-v4", "inception-resnet-v2", "efficientnet-cifar", "efficientnet-lite0", "mobilenet-v2",
    "mobilenet-v3-small",
)  # fmt: skip
"""One member of each, for `make test`."""


def numbers(count: int) -> Tensor:
    """Numbers between -1 and 1 that look like chance; whole-number arithmetic gives the same bits on every machine."""
    index = torch.arange(count)
    return ((index * index * 2654435761 + index * 40503) >> 8 & 0xFFFFFF).double() / 2**23 - 1


@torch.no_grad()
def fill(network: Network) -> None:
    """Set every tensor, running statistics included, so that pictures neither die nor explode."""
    values = numbers(1_000_003)
    for name, tensor in network.state_dict().items():
        for part in tensor.view(-1).split(len(values)):
            part.copy_(values[: len(part)])
        values = values.roll(-997)  # the next tensor starts elsewhere
        if tensor.dim() > 1:
            tensor.mul_((6 / tensor[0].numel()) ** 0.5)
        elif name.endswith(("weight", "running_var")):
            tensor.div_(4).add_(1)
        else:
            tensor.div_(8)


def recipe(model: str) -> Recipe:
    page = f"{{model: {model}, global_batch: 1, epochs: 1, optimizer: {{name: sgd, lr: 0.1}}, schedule: constant}}"
    return build(Recipe, parse(page, "golden"))


@torch.no_grad()
def scores(name: str, shift: int = 0) -> list[float]:
    """The first scores of an image that is as small as the network takes, its side odd where that may be."""
    plain = "{name: inception-v3, auxiliary: 0}" if name == "inception-v3" else name  # heads count in training only
    side = max(smallest_side(recipe(plain).model), 9 if member(name).side == 32 else 33)
    with torch.device("meta"):
        network = build_network(recipe(name), DataFacts(1, 1, CLASSES, side))
    network = network.double().to_empty(device="cpu").eval()
    fill(network)
    images = 2 * numbers(shift + 3 * side**2)[shift:].view(1, 3, side, side)
    made: Tensor = network(images)
    return [float(score) for score in made[0, :KEPT]]


def stored() -> dict[str, list[float]]:
    kept: dict[str, list[float]] = json.loads(FILE.read_text())
    return kept


@pytest.mark.parametrize(
    "name", [pytest.param(row.name, marks=() if row.name in FAMILIES else pytest.mark.long) for row in MEMBERS]
)
def test_a_network_gives_the_scores_it_always_gave(name: str) -> None:
    assert scores(name) == pytest.approx(stored()[name], rel=1e-9)


def test_every_network_has_its_scores_on_file() -> None:
    assert list(stored()) == [row.name for row in MEMBERS]
    assert all(len(row) == KEPT for row in stored().values())


def write(chosen: list[str]) -> None:
    """Write the scores of these networks anew, or of all."""
    kept = stored() if chosen else {}
    for row in MEMBERS:
        if not chosen or row.name in chosen:
            kept[row.name] = scores(row.name)
            other = scores(row.name, shift=1000)
            # Scores that hardly depend on the image would not notice a change in the network.
            change = max(abs(a - b) for a, b in zip(kept[row.name], other, strict=True))
            assert change > 1e-5 * max(map(abs, other)), (row.name, kept[row.name], other)
            print(row.name, kept[row.name], flush=True)
    lines = ",\n".join(f'"{row.name}": {json.dumps(kept[row.name])}' for row in MEMBERS)
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(sys.argv[1:])
