"""Every network: it trains and validates, can be cut and recomputed before any block, and is one run on two layouts.

One small member of each family belongs to `make test`, every row of the table to `make test-all`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_recipe, make_session
from paceline.model.batch import Batch
from paceline.model.network import Network, recomputing
from paceline.model.tables import MEMBERS, smallest_side
from paceline.planning import Plan
from paceline.settings.model import (
    CifarResNet,
    CifarResNeXt,
    EfficientNet,
    InceptionV3,
    MobileNetV2,
    MobileNetV3,
    Model,
    ResNet,
    ResNeXt,
)
from paceline.training.evaluate import evaluate_network
from paceline.training.state import State, build_state
from paceline.training.step import take_step
from paceline.training.trials import Trial, compare_outcomes
from paceline.world import World

WORLD = World(torch.device("cpu"))
IMAGES = 4
EXACT = 1e-12

SMALL = {
    "alexnet": 63,
    "{name: vgg11-bn, head: mean}": 32,
    "resnet10": 32,
    "resnet8": 8,
    "resnext14": 32,
    "resnext11": 8,
    "googlenet": 32,
    "{name: inception-v3, auxiliary: 0}": 75,
    "inception-v4": 75,
    "{name: inception-resnet-v2, units: [1, 1, 2]}": 75,
    "efficientnet-cifar": 16,
    "{name: efficientnet-lite0, width: 0.25, divisor: 4}": 32,
    "mobilenet-v2": 32,
    "mobilenet-v3-small": 32,
}
"""One small member of each family, and a side that shows all of its blocks."""
FOR_REPLICAS = ("resnet10", "resnet8", "resnext11", "efficientnet-cifar")
"""Members whose layouts `make test` compares; every member's are compared in `make test-all`."""


def model(page: str) -> Model:
    return make_recipe(f"model={page}").model


def cases() -> Iterator[Any]:
    """A model and a side for each test; Inception v3 with its auxiliary head needs all of its 299 pixels."""
    for page, side in SMALL.items():
        yield pytest.param(page, side, id=f"small-{model(page).name}")
    for row in MEMBERS:
        side = max(smallest_side(model(row.name)), 16 if row.side == 32 else 64)
        yield pytest.param(row.name, side, id=row.name, marks=pytest.mark.long)


def calm(settings: Model) -> tuple[str, ...]:
    """Settings in which nothing explodes, rounding least of all.

    A norm over few numbers multiplies every deviation, and a deep network does so until it is millions of times larger.
    An epsilon about as large as the variances keeps gradients of one size in all layers, or in very deep residual
    networks the branches small.
    """
    match settings:
        case ResNet() | CifarResNet() | ResNeXt() | CifarResNeXt():
            epsilon = 1.0
        case EfficientNet() | MobileNetV2() | MobileNetV3():
            epsilon = 0.05
        case InceptionV3(auxiliary=weight) if weight:
            epsilon = 0.4  # so many pixels that what is left of a picture is a small difference of large numbers
        case _:
            epsilon = 0.2
    return (f"norm.epsilon={epsilon}", "optimizer.lr=0.001")


@dataclass
class Built:
    """A network with what it takes to train it."""

    plan: Plan
    state: State

    @property
    def network(self) -> Network:
        network: Network = self.state.network.module
        return network

    def pieces(self) -> list[Network]:
        """The network cut before every block that the tables list."""
        return self.network.cut(self.plan.network.blocks)

    def images(self) -> Tensor:
        """Some images."""
        side = self.plan.facts.side
        return torch.sin(torch.arange(IMAGES * 3 * side**2, dtype=torch.float32)).view(IMAGES, 3, side, side)

    def batch(self) -> Batch:
        """What layers are told of those images in training."""
        whole = self.state.network
        return Batch(whole.statistics.pass_rows(0), *whole.masks(torch.arange(IMAGES)))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """The network of a case, with torch's own initial weights: ours take longer, and their values do not matter."""
    page, side = request.param
    data = ("data.images=8", "data.validation_images=3", f"data.side={side}")
    batches = (f"global_batch={IMAGES}", f"norm_batch={IMAGES}", f"on.micro_batch={IMAGES}")
    plan = make_plan(f"model={page}", *data, *batches, *calm(model(page)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Built(plan, build_state(plan, WORLD))


every_network = pytest.mark.parametrize(
    "built", [pytest.param(case.values, id=case.id, marks=case.marks) for case in cases()], indirect=True
)


@every_network
def test_it_trains_a_step_and_validates(built: Built) -> None:
    plan, state = built.plan, built.state
    before = {name: tensor.clone() for name, tensor in built.network.state_dict().items()}
    session = make_session(plan, state=state)
    with closing(session.loader.training(0)) as shares:
        take_step(session, next(shares))
    assert not state.bad_steps()
    assert 0 < state.last_sums[0] / IMAGES < 100
    for name, tensor in built.network.state_dict().items():
        # The gradient of a shift before a norm is zero, so only tables of weights and the statistics must move.
        if tensor.dim() > 1 or "running_" in name:
            assert not torch.equal(tensor, before[name]), name
    row = evaluate_network(session).row
    assert row["images"] == 3
    assert 0 < row["loss"] < 100


Carried = tuple[Tensor, ...]


def as_tuple(made: Tensor | Carried) -> Carried:
    return (made,) if isinstance(made, Tensor) else made


def equal(one: Carried, other: Carried) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@every_network
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@torch.no_grad()
def test_cut_before_every_block_it_gives_the_same_scores(built: Built, training: bool) -> None:
    built.network.train(training)
    carried: Carried = (built.images(),)
    batch = built.batch() if training else None
    whole = as_tuple(built.network(*carried, batch=batch))
    for piece in built.pieces():
        before = tuple(tensor.clone() for tensor in carried)
        made = as_tuple(piece(*carried, batch=batch))
        assert equal(carried, before)  # a stage must not write into what another one has handed over
        carried = made
    assert equal(carried, whole)
    heads = [name for name in built.plan.network.blocks if name.startswith("aux")]
    assert len(whole) == 1 + (len(heads) if training else 0)


@every_network
def test_two_stages_hold_the_whole_network_wherever_it_is_cut(built: Built) -> None:
    blocks = list(built.network.named_children())
    assert [name for name, _ in blocks] == list(built.plan.network.blocks)
    for name in built.plan.network.blocks[1:]:
        first, second = (list(stage.named_children()) for stage in built.network.cut([name]))
        assert second[0][0] == name
        assert [*first, *second] == blocks


@every_network
def test_recomputed_at_every_block_it_gives_the_same_gradients(built: Built) -> None:
    network, calls = built.network.train(), []
    images, batch = built.images(), built.batch()
    for block in network:
        block.register_forward_pre_hook(lambda *_: calls.append(1))

    def learn(forward: Callable[..., Any]) -> tuple[int, list[Tensor]]:
        """How many blocks were run, every gradient, and the norms' statistics."""
        calls.clear()
        network.zero_grad()
        scores = as_tuple(forward(images, batch=batch))
        mixture = torch.sin(torch.arange(scores[0].numel(), dtype=torch.float32)).view_as(scores[0])
        torch.stack([(each * mixture).sum() for each in scores]).sum().backward()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        return len(calls), [*gradients, built.state.network.statistics.collect().clone()]

    blocks, kept = learn(network)
    runs, recomputed = learn(recomputing(built.pieces()))
    network.zero_grad()
    assert (blocks, runs) == (len(network), 2 * len(network) - 1)
    assert len(kept) >= len(list(network.parameters()))
    assert equal(tuple(kept), tuple(recomputed))


@pytest.mark.parametrize(("page", "side"), [case for case in cases() if case.marks or case.values[0] in FOR_REPLICAS])
def test_it_is_the_same_run_on_two_layouts(tmp_path: Path, page: str, side: int) -> None:
    if page.startswith("vgg"):  # its dense layers are AlexNet's, and would take a billion bytes more for each replica
        page = f"{{name: {page}, head: mean}}"
    words = (f"model={page}", f"data.side={side}", "norm_batch=8", *calm(model(page)), "on.precision=fp64")
    inits = ("init.conv=uniform-fan-in", "init.dense=uniform-fan-in")
    outcomes = []
    for replicas, micro_batch in ((1, 16), (2, 4)):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        plan = make_plan(*words, *inits, "on.cpu_threads=1", f"on.replicas={replicas}", f"on.micro_batch={micro_batch}")
        outcomes.append(Trial(folder, None, 2).finish(plan))
        shutil.rmtree(folder)  # pytest would keep a billion bytes of it
    found = compare_outcomes(*outcomes)
    # The deepest one without squeeze-and-excite multiplies rounding by itself: 1.2e-12 after two steps.
    assert max(found.values()) <= (10 * EXACT if page == "efficientnet-lite4" else EXACT), found
