"""Networks of other packages, with small packages made up here: what becomes Paceline's, and what is refused."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import SMALL, make_plan, make_recipe
from paceline.command import train
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError, UserError
from paceline.model import packages as outside
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.dropout import Dropout, DropoutMasks, StochasticDepth
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct, GroupNormAct, Statistics, norm_parameters
from paceline.model.packages import PACKAGES, check_packages
from paceline.model.whole import Whole
from paceline.optim.build import assign_rules, decays, head_weights, parameter_groups
from paceline.optim.lars import LarsRule
from paceline.optim.muon import MuonRule
from paceline.settings.model import External
from paceline.settings.optimizer import WeightDecay
from paceline.settings.schema import kinds
from paceline.training.state import build_state, initialize_state
from paceline.world import World

WORLD = World(torch.device("cpu"))
EXACT = ("on.precision=fp64",)


class DropPath(nn.Module):
    """As in timm."""

    def __init__(self, drop_prob: float | None) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1, 1, 1), 1 - (self.drop_prob or 0))) if self.training else x


class ActiveNorm(nn.BatchNorm2d):
    """A norm that drops and activates, as timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(super().forward(x))
        return y


class Small(nn.Module):
    """Convolutions, norms with numbers of their own, a path that is dropped, dropouts of two widths, a dense layer."""

    def __init__(self, classes: int, channels: int = 3, path: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8, eps=1e-3, momentum=0.02)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), ActiveNorm(8), path or DropPath(0.25))
        self.drop = nn.Dropout(0.3)
        self.bn2 = nn.BatchNorm2d(8, eps=2e-5, momentum=0.3)
        self.hidden = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.4, inplace=True))
        self.fc = nn.Linear(12, classes)
        nn.init.constant_(self.bn2.weight, 0.5)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.max_pool2d(self.drop(y + self.block(y)), 2)
        return self.fc(self.hidden(self.bn2(y).mean((2, 3))))


class Drawing(Small):
    """A network that drops by itself."""

    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.1, self.training)


class Vectors(Small):
    """A network with a norm over vectors."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.bn3 = nn.BatchNorm1d(classes)


class Headed(Small):
    """A network with an auxiliary head, and a place for another; in training it gives all scores, as torchvision's."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.aux1 = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return (scores, None, self.aux1(x.mean((2, 3)))) if self.training else scores


class Picky(Small):
    """A network that takes only large images, and says nothing of it."""

    def forward(self, x: Tensor) -> Any:
        if x.shape[-1] < 64:
            raise AssertionError
        return super().forward(x)


class StochasticDepthOf(nn.Module):
    """As in torchvision, whose class has the name given below."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.ones(1)) if self.training and self.p else x


StochasticDepthOf.__name__ = "StochasticDepth"

MADE: dict[str, Callable[[int], nn.Module]] = {
    "small": Small,
    "drawing": Drawing,
    "vectors": Vectors,
    "headed": Headed,
    "picky": Picky,
    "row": lambda classes: Small(classes, path=StochasticDepthOf(0.35, "row")),
    "batch": lambda classes: Small(classes, path=StochasticDepthOf(0.35, "batch")),
    "none": lambda classes: Small(classes, path=DropPath(None)),
    "channels": lambda classes: Small(classes, path=nn.Dropout2d(0.2)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched weights stay in the test."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Put small packages where timm and torchvision would be; gives what they are asked."""
    asked: list[tuple[str, dict[str, Any]]] = []
    timm, torchvision, models = (ModuleType(name) for name in ("timm", "torchvision", "torchvision.models"))

    def make(name: str, classes: int | None) -> nn.Module:
        if name == "silent":
            raise KeyError
        if name not in MADE:
            raise RuntimeError(f"Unknown model ({name})\nand a second line")
        return MADE[name](classes or 1000)

    def create_model(name: str, pretrained: bool = False, **more: Any) -> nn.Module:
        asked.append((name, {"pretrained": pretrained, **more}))
        if more.get("in_chans", 3) != 3:
            return Small(more["num_classes"], more["in_chans"])
        return make(name, more.get("num_classes"))

    def get_model(name: str, **more: Any) -> nn.Module:
        asked.append((name, more))
        return make(name, more.get("num_classes"))

    timm.create_model = create_model  # type: ignore[attr-defined]
    models.get_model = get_model  # type: ignore[attr-defined]
    torchvision.models = models  # type: ignore[attr-defined]
    for module in (timm, torchvision, models):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def build(model: str, *words: str) -> Network:
    plan = make_plan(f"model={model}", *words)
    return build_network(plan.recipe, plan.facts)


def the(network: nn.Module, kind: Any) -> list[Any]:
    return [part for part in network.modules() if isinstance(part, kind)]


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_name_with_a_package_is_that_package_s_network_as_one_block(
    package: str, packages: list[tuple[str, dict[str, Any]]]
) -> None:
    plan = make_plan(f"model={package}:small", "data.classes=6")
    assert plan.recipe.model == External(name=package, network="small")  # type: ignore[arg-type]
    network = build_network(plan.recipe, plan.facts)
    assert list(dict(network.named_children())) == list(plan.network.blocks) == ["network"]
    assert network.eval()(torch.zeros(2, 3, 8, 8)).shape == (2, 6)
    expected = (
        {"pretrained": False, "num_classes": 6, "in_chans": 3}
        if package == "timm"
        else {"weights": None, "num_classes": 6}
    )
    assert packages == [("small", expected)]


def test_timm_is_told_the_channels_of_the_images() -> None:
    network = build("timm:small", "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]")
    assert network.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_norms_become_paceline_s_with_their_own_epsilon_and_momentum() -> None:
    network = build("timm:small")
    assert not the(network, nn.modules.batchnorm._BatchNorm)
    assert [(norm.epsilon, norm.momentum) for norm in the(network, BatchNormAct)] == [
        (1e-3, 0.02), (1e-5, 0.1), (2e-5, 0.3),
    ]  # fmt: skip
    assert [norm.activation for norm in the(network, BatchNormAct)] == [None, None, None]
    assert [norm.weight.mean().item() for norm in the(network, BatchNormAct)] == [1, 1, 0.5]  # and start as theirs do
    named = [norm.epsilon for norm in the(build("timm:small", "norm.epsilon=0.5"), BatchNormAct)]
    assert named == [0.5] * 3  # what the recipe says goes first
    assert len(the(build("timm:small", "norm=group"), GroupNormAct)) == 3


def test_each_norm_moves_by_its_own_momentum() -> None:
    plan = make_plan("model=timm:small", "norm_batch=16", *EXACT)
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    network = state.network
    network.forward_backward(next(open_loader(plan, None, 0, WORLD.device).training(0)))
    rows = network.statistics.pass_rows(0).clone()
    seen = [[values[0] for values in norm.columns(rows)] for norm in the(network.module, BatchNormAct)]
    network.statistics.update(network.statistics.collect(), 1, torch.zeros(()))
    for norm, (mean, var), momentum in zip(the(network.module, BatchNormAct), seen, (0.02, 0.1, 0.3), strict=True):
        assert torch.allclose(norm.running_mean, momentum * mean, rtol=1e-12)
        assert torch.allclose(norm.running_var, (1 - momentum) + momentum * var, rtol=1e-12)


def test_the_word_norm_means_norms_whatever_another_package_calls_them() -> None:
    module = build("timm:small")
    named, norms = dict(module.named_parameters()), norm_parameters(module)
    assert norms == {f"network.network.{n}.{p}" for n in ("bn1", "block.1.0", "bn2") for p in ("weight", "bias")}
    decay = WeightDecay(rate=0.1, skip_names=("norm",))
    plan = make_plan("model=timm:small", "optimizer={name: lars, lr: 1}")
    assert {name for name, p in named.items() if not decays(decay, name, p, norms)} == norms
    pairs = assign_rules(plan, parameter_groups(plan, named, norms), norms, set())
    skipped = {name for some, rule in pairs if isinstance(rule, LarsRule) and rule.skipped for name in some.parameters}
    assert skipped == {name for name, parameter in named.items() if parameter.dim() == 1}  # biases by their name


def test_muon_leaves_the_weights_that_decide_between_classes_to_adamw_whatever_they_are_called() -> None:
    named = dict(build("timm:small").named_parameters())
    plan = make_plan("model=timm:small", "optimizer={name: muon, lr: 1}")
    pairs = assign_rules(plan, parameter_groups(plan, named), set(), head_weights(plan, named))
    made = {name for some, rule in pairs if isinstance(rule, MuonRule) for name in some.parameters}
    assert made == {f"network.network.{name}.weight" for name in ("conv1", "block.0", "hidden.0")}


def test_a_norm_that_activates_still_does() -> None:
    with torch.random.fork_rng(devices=[]):
        network, original = build("timm:small", "seed=3").eval(), Small(10).eval()
    theirs = original.state_dict()
    names = [name for name in theirs if "num_batches_tracked" not in name]
    ours = network.state_dict()
    assert len(names) == len(ours)
    for name, tensor in zip(names, ours.values(), strict=True):  # the order stays, whatever the names
        assert theirs[name].shape == tensor.shape
        value = torch.sin(torch.arange(tensor.numel(), dtype=torch.float32)).view(tensor.shape)
        theirs[name].copy_(value + 1.5 if "running_var" in name else value)
        tensor.copy_(theirs[name])
    x = torch.sin(torch.arange(2 * 3 * 64, dtype=torch.float32)).view(2, 3, 8, 8)
    assert torch.allclose(network(x), original(x), rtol=1e-5)
    assert (original.block[1](torch.randn(2, 8, 2, 2, generator=torch.Generator().manual_seed(0))) >= 0).all()


def test_what_drops_becomes_keyed_with_its_rate_and_width() -> None:
    network = build("timm:small")
    assert not the(network, nn.Dropout) + the(network, DropPath)
    assert [(part.rate, part.features) for part in the(network, Dropout)] == [(0.3, 8 * 8 * 8), (0.4, 12)]
    assert [part.rate for part in the(network, StochasticDepth)] == [0.25]
    other = build("timm:small", "data.side=12")
    assert [part.features for part in the(other, Dropout)] == [8 * 12 * 12, 12]


@pytest.mark.parametrize(("name", "rate"), [("row", 0.35), ("none", 0.0)])
def test_paths_that_are_dropped_by_the_image_become_stochastic_depth(name: str, rate: float) -> None:
    network = build(f"torchvision:{name}")
    assert [part.rate for part in the(network, StochasticDepth)] == [rate]
    assert not the(network, StochasticDepthOf)


def test_it_trains_by_keyed_numbers_alone_and_in_the_same_way_however_a_step_is_cut() -> None:
    found = []
    before = torch.get_rng_state()
    for micro_batch in (16, 4):
        plan = make_plan("model=timm:small", f"on.micro_batch={micro_batch}", *EXACT)
        whole = Whole(plan, WORLD)
        whole.forward_backward(next(open_loader(plan, None, 0, WORLD.device).training(0)))
        found.append({name: p.grad for name, p in whole.module.named_parameters()})
    for name, gradient in found[0].items():
        other = found[1][name]
        assert gradient is not None
        assert other is not None
        assert torch.allclose(gradient, other, rtol=1e-9, atol=1e-9)
    assert torch.equal(torch.get_rng_state(), before)


def test_looking_at_a_network_leaves_no_trace_in_it() -> None:
    network = build("timm:small")
    for norm in the(network, BatchNormAct):
        assert not norm.running_mean.any()
        assert (norm.running_var == 1).all()
    assert not any(p.grad is not None for p in network.parameters())
    assert network.training
    hooked = [part for part in network.modules() if part._forward_pre_hooks]
    assert hooked == the(network, BatchNormAct | Dropout | StochasticDepth)  # which are handed the micro-batch
    assert network[0]._batch is None


def test_auxiliary_scores_ride_along_and_empty_ones_do_not() -> None:
    network = build("torchvision:headed")
    batch = Batch(Statistics(network, 1, 1).pass_rows(0), *DropoutMasks(network, 0, torch.float32)(torch.arange(2)))
    assert [scores.shape for scores in network(torch.zeros(2, 3, 8, 8), batch=batch)] == [(2, 10), (2, 10)]
    assert network.eval()(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_the_loss_of_an_auxiliary_head_has_the_weight_that_the_recipe_says() -> None:
    losses = {}
    for weight in (0.0, 0.3, 1.0):
        plan = make_plan("model=torchvision:headed", f"model.auxiliary={weight}", *EXACT)
        whole = Whole(plan, WORLD)
        share = next(open_loader(plan, None, 0, WORLD.device).training(0))
        losses[weight] = whole.forward_backward(share)[0].item()
    assert losses[0.3] - losses[0.0] == pytest.approx(0.3 * (losses[1.0] - losses[0.0]), rel=1e-9)
    assert losses[1.0] > losses[0.0]


def refusal(model: str, *words: str) -> str:
    with pytest.raises(PlanError) as found:
        build(model, *words)
    message = str(found.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("name", ["drawing", "batch", "channels"])
def test_a_network_that_draws_random_numbers_of_its_own_is_refused(name: str) -> None:
    message = refusal(f"timm:{name}")
    assert message.startswith(f"timm:{name} draws random numbers of its own in training")
    assert "choose a network without them" in message


def test_norms_over_vectors_are_refused() -> None:
    assert refusal("torchvision:vectors") == (
        "torchvision:vectors has batch norms over vectors or without a scale, which cannot keep norm groups"
    )


def install(monkeypatch: pytest.MonkeyPatch, torch_version: str, torchvision: str | None = None, *needs: str) -> None:
    """Let another torch be the one that is installed, and a torchvision with its needs beside it, or none."""
    versions = {"torch": torch_version, "torchvision": torchvision}

    def version(name: str) -> str:
        found = versions.get(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [*needs] if version(name) else None)


CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
FITTING = {"timm": "timm torchvision==0.28.0", "torchvision": "torchvision==0.28.0"}
"""What to install beside torch 2.13."""


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_package_that_is_not_installed_is_one_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    install(monkeypatch, "2.13.0")
    command = f"pip install -c {CONSTRAINTS} {FITTING[package]}"
    expected = f"{package} is not installed; write {command}, which fits torch 2.13.0, or"
    assert refusal(f"{package}:small") == f"model: {expected} a network of Paceline's"
    plan = make_plan(f"init.from={package}:small")
    with pytest.raises(PlanError) as found:
        initialize_state(build_state(plan, WORLD), plan)
    assert str(found.value) == f"init.from: {expected} a .safetensors or .pth file, or a run"


def test_the_versions_that_are_tested_fit_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    install(monkeypatch, tested["torch"])
    monkeypatch.chdir(CONSTRAINTS.parent)
    assert f"write pip install -c constraints.txt torchvision=={tested['torchvision']}, which" in refusal(
        "torchvision:x"
    )


@pytest.mark.parametrize(
    ("torch_version", "fitting"),
    [
        ("2.12.1", "torchvision==0.27.1"),
        ("2.11.0+cu128", "torchvision==0.26.0"),
        ("2.14.0", "'torchvision>=0.29.2'"),
        ("2.15.0", "'torchvision>=0.29.2'"),
        ("unknown", "torchvision"),
    ],
)
def test_the_release_that_fits_the_installed_torch_is_named(
    torch_version: str, fitting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    install(monkeypatch, torch_version)
    assert f"; write pip install {fitting}, which fits torch {torch_version}, or" in refusal("torchvision:small")


def test_timm_without_torchvision_is_refused_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    install(monkeypatch, "2.11.0")
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["torch", "torchvision", "pyyaml"])
    with pytest.raises(
        PlanError, match=r"timm needs torchvision, which is not installed; write pip install timm torch"
    ):
        check_packages(make_recipe("init.from=timm:small"))


def test_a_torchvision_for_cuda_beside_a_torch_without_is_refused_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = make_recipe("init.from=torchvision:small")
    install(monkeypatch, "2.13.0+cpu", "0.28.0", "torch==2.13.0")
    with pytest.raises(PlanError) as found:
        check_packages(checked)
    assert str(found.value) == (
        "init.from: torchvision 0.28.0 is built for a torch with CUDA, and torch 2.13.0+cpu is installed; give a "
        ".safetensors or .pth file, or a run: pip has no torchvision for the CPU-only torch 2.13.0+cpu; what fits is "
        "torchvision==0.28.0, from where that torch came"
    )
    install(monkeypatch, "2.13.0+cpu", "0.28.0+cpu", "torch==2.13.0")
    check_packages(checked)


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_beside_a_torch_without_cuda_a_file_is_the_advice(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    install(monkeypatch, "2.13.0+cpu")
    plan = make_plan(f"init.from={package}:small")
    with pytest.raises(PlanError, match=r"; give a \.safetensors or \.pth file, or a run: pip has no"):
        initialize_state(build_state(plan, WORLD), plan)


def test_a_package_made_for_another_torch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    fault = "raise RuntimeError('operator torchvision::nms does not exist\\nand more')"
    (tmp_path / "torchvision" / "__init__.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name)
    install(monkeypatch, "2.11.0+cu128", "0.29.2")
    assert refusal("torchvision:small") == (
        "model: torchvision 0.29.2 cannot be imported: operator torchvision::nms does not exist; write pip install "
        "torchvision==0.26.0, which fits torch 2.11.0+cu128, or a network of Paceline's"
    )


@pytest.mark.parametrize(
    ("torch_version", "need", "fits"),
    [
        ("2.13.0", "torch==2.13.0", True),
        ("2.13.1+cu130", "torch (==2.13.0)", True),
        ("2.13.0", "torch==2.14.0", False),
        ("2.13.0", "torch (>=2.14.0)", False),
        ("2.15.0", "torch>=2.14.0", True),
        ("2.15.0", "torch==2.14.0", False),
        ("2.13.0", "torch", True),
        ("unknown", "torch==2.14.0", True),
    ],
)
@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_torchvision_that_needs_another_torch_is_refused_before_torch_is_loaded(
    package: str, torch_version: str, need: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, torch_version, "0.29.2", "numpy", need, "pillow>=5", "gdown; extra == 'gdown'")
    checked = make_recipe(f"init.from={package}:small")
    if fits:
        check_packages(checked)
        return
    with pytest.raises(PlanError) as found:
        check_packages(checked)
    assert str(found.value).startswith(
        f"init.from: torchvision 0.29.2 needs torch 2.14, and torch {torch_version} is installed; write pip install "
    )


@pytest.mark.parametrize("word", ["model=timm:small", "init.from=timm:small"])
def test_a_package_that_is_not_installed_costs_no_run_folder(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    (tmp_path / "small.yaml").write_text(SMALL)
    with pytest.raises(PlanError, match="timm is not installed"):
        train.run(str(tmp_path / "small.yaml"), [word], None, tmp_path / "run", None, None, "cpu")
    assert not (tmp_path / "run").exists()


def test_every_package_that_a_recipe_can_name_is_in_the_table() -> None:
    assert set(PACKAGES) == set(kinds(External))


@pytest.mark.parametrize(("name", "why"), [("nonsense", "Unknown model (nonsense)"), ("silent", "KeyError")])
@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_what_a_package_cannot_make_is_one_line(package: str, name: str, why: str) -> None:
    assert refusal(f"{package}:{name}") == f"{package}:{name}: {package} cannot make it: {why}"


@pytest.mark.parametrize(("model", "side", "why"), [("timm:picky", 8, "AssertionError"), ("timm:small", 1, "")])
def test_images_that_a_network_does_not_take_are_one_line(model: str, side: int, why: str) -> None:
    message = refusal(model, f"data.side={side}", "augment.pad=0")
    assert message.startswith(f"{model} does not take images of 3 x {side} x {side}: ")
    assert message.endswith(why)
    assert len(message) > 50


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 2])
def test_the_package_s_own_weights_follow_from_the_recipe_s_seed(seed: int) -> None:
    found = []
    for stand in (1, 99):  # wherever torch's own generator stands
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stand)
            before = torch.get_rng_state()
            found.append(build("timm:small", f"seed={seed}").state_dict())
            assert torch.equal(torch.get_rng_state(), before)
    one, again = found
    other = build("timm:small", f"seed={seed + 1}").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert not torch.equal(one["network.network.conv1.weight"], other["network.network.conv1.weight"])


def test_a_run_begins_with_the_weights_that_the_package_made() -> None:
    plan = make_plan("model=timm:small", "init.conv=normal-0.1")
    state = build_state(plan, WORLD)
    before = {name: value.clone() for name, value in state.network.module.state_dict().items()}
    assert initialize_state(state, plan) is None
    assert all(torch.equal(value, before[name]) for name, value in state.network.module.state_dict().items())


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_published_weights_are_asked_for_and_a_head_for_other_classes_starts_anew(
    package: str, packages: list[tuple[str, dict[str, Any]]]
) -> None:
    plan = make_plan(f"model={package}:headed", f"init.from={package}:headed")
    state = build_state(plan, WORLD)
    loaded = initialize_state(state, plan)
    assert loaded is not None
    heads = [f"network.network.{head}" for head in ("fc", "aux1")]
    assert loaded.initial == [f"{head}.{last}" for head in heads for last in ("weight", "bias")]
    assert loaded.tensors == len(state.network.module.state_dict()) - 4
    assert packages[-1] == ("headed", {"pretrained": True} if package == "timm" else {"weights": "DEFAULT"})


def test_published_weights_that_were_fetched_once_need_neither_network_nor_package(
    packages: list[tuple[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("model=torchvision:headed", "init.from=timm:headed")
    state = build_state(plan, WORLD)
    first = str(initialize_state(state, plan))
    fetched = {name: value.clone() for name, value in state.network.module.state_dict().items()}
    assert (tmp_path / "cache" / "weights" / "timm-headed.pth").is_file()
    again = build_state(plan, WORLD)
    packages.clear()
    monkeypatch.setitem(sys.modules, "timm", None)
    outside.check_packages(plan.recipe)
    assert str(initialize_state(again, plan)) == first
    assert packages == []
    assert all(torch.equal(value, fetched[name]) for name, value in again.network.module.state_dict().items())


def test_published_weights_that_do_not_fit_are_one_line() -> None:
    plan = make_plan("init.from=timm:small")
    with pytest.raises(UserError, match=r"^init.from: timm:small does not fit this network: 'conv1\.weight' .*$"):
        initialize_state(build_state(plan, WORLD), plan)


def test_a_plan_of_one_frozen_block_trains_nothing_and_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing trains"):
        make_plan("model=timm:small", "freeze=[network]")
