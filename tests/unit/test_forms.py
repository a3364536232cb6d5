"""Which blocks take a fused form, what that changes in a run (nothing), and which placements are refused."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import nn

from bottleneck_cases import distance
from conftest import make_plan, make_session
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError
from paceline.model.build import build_network
from paceline.model.forms import (
    BOTTLENECK,
    CONVOLUTIONS,
    EXPANSION,
    EXPANSION_AND_SQUEEZE,
    NORMS,
    PLAIN,
    RELU,
    SQUEEZE,
    STEM,
    StepWeights,
    fuse,
)
from paceline.model.kernels import bottleneck
from paceline.model.kernels.bottleneck import compute_weight, wide_weight
from paceline.model.kernels.convolution import NarrowConv
from paceline.model.layers import ConvNorm
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.model.resnet import ResidualUnit, Stem
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.settings import placement
from paceline.training.step import take_step
from paceline.world import World

WORLD = World(torch.device("cpu"))
FUSED = "on.kernels=fused"
# Norms that divide by next to nothing would multiply rounding, by thousands in Inception's smallest maps.
BATCH = ("norm={name: batch, epsilon: 0.1}", "norm_batch=8")
GROUP = ("norm={name: group, groups: 4, epsilon: 0.1}",)
PROXY = ("norm={name: group, groups: 4, epsilon: 0.1, proxy: true}",)


def planned(model: str, *words: str) -> tuple[Plan, Network]:
    """A plan, and its network without memory."""
    plan = make_plan(f"model={model}", "data.side=64", "norm_batch=16", *words)
    with torch.device("meta"):
        return plan, build_network(plan.recipe, plan.facts)


@pytest.mark.parametrize(
    ("model", "stem", "units"),
    [
        ("resnet50", STEM, BOTTLENECK),
        ("resnext50", STEM, BOTTLENECK),
        ("resnet18", STEM, NORMS),
    ],
)
def test_each_block_takes_the_fused_form_that_it_can_have(model: str, stem: str, units: str) -> None:
    plan, network = planned(model, FUSED)
    forms = fuse(network, plan)
    assert list(forms) == list(network._modules)
    blocks = [name for name in forms if name.startswith("stage")]
    assert forms["stem"] == stem
    assert {forms[name] for name in blocks} == {units}
    assert forms["head"] == PLAIN
    assert all(norm.fused for norm in network.modules() if isinstance(norm, BatchNormAct))
    assert {unit.fused for unit in network if isinstance(unit, ResidualUnit)} <= {units == BOTTLENECK}
    assert [each.fused for each in network if isinstance(each, Stem)] in ([], [torch.float32 if stem == STEM else None])


@pytest.mark.parametrize(
    ("model", "first", "widening", "widest"),
    [
        ("efficientnet-b0", SQUEEZE, EXPANSION_AND_SQUEEZE, SQUEEZE),
        ("efficientnet-lite0", NORMS, EXPANSION, NORMS),
        ("mobilenet-v2", NORMS, EXPANSION, NORMS),
    ],
)
def test_units_widen_in_the_fused_form_unless_they_are_wide_already(
    model: str, first: str, widening: str, widest: str
) -> None:
    plan, network = planned(model, FUSED)
    forms = fuse(network, plan)
    units = [form for name, form in forms.items() if name.startswith("stage")]
    assert (units[0], units[1], units[-1]) == (first, widening, widest)
    for layer in [module for module in network.modules() if isinstance(module, ConvNorm)]:
        narrow = layer.conv.kernel_size == (1, 1) and layer.conv.in_channels <= 128
        assert layer.expands is narrow


def test_only_the_strided_units_of_version_1_keep_their_products_apart() -> None:
    plan, network = planned("{name: resnet50, version: v1}", FUSED)
    forms = fuse(network, plan)
    apart = [name for name, form in forms.items() if form == NORMS]
    assert apart == ["stage2/unit1", "stage3/unit1", "stage4/unit1"]


def test_narrow_bottlenecks_keep_their_products_apart() -> None:
    plan, network = planned("resnet29-bottleneck", FUSED)
    forms = fuse(network, plan)
    assert {name.partition("/")[0] for name, form in forms.items() if form == BOTTLENECK} == {"stage3"}


@pytest.mark.parametrize(("model", "form"), [("vgg16-bn", NORMS), ("vgg16", RELU)])
def test_convolutions_of_vgg_have_fused_norms_or_a_fused_relu(model: str, form: str) -> None:
    plan, network = planned(model, FUSED)
    forms = fuse(network, plan)
    assert {each for name, each in forms.items() if name.startswith("stage")} == {form}
    assert {each for name, each in forms.items() if not name.startswith("stage")} == {PLAIN}


@pytest.mark.parametrize("model", ["resnet50", "resnet18", "efficientnet-b0"])
def test_every_block_is_plain_unless_the_placement_wants_another_form(model: str) -> None:
    for words in ((), ("on.kernels=plain",)):
        plan, network = planned(model, *words)
        assert fuse(network, plan) == dict.fromkeys(network._modules, PLAIN)
        assert not any(getattr(module, "fused", False) for module in network.modules())


def test_only_bfloat16_has_fused_products_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for precision, form in (("bf16", BOTTLENECK), ("fp16", NORMS), ("fp32", NORMS), ("fp64", NORMS)):
        plan, network = planned("resnet50", FUSED, "on.device=cuda", f"on.precision={precision}")
        forms = fuse(network, plan)
        assert forms["stage2/unit1"] == form
        assert forms["stem"] == (STEM if form == BOTTLENECK else NORMS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    plan, network = planned("resnet50", FUSED, "on.device=cuda", "on.precision=bf16")
    assert set(fuse(network, plan).values()) == {PLAIN}


def test_only_float32_has_fused_convolutions_and_only_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for words, form in [
        (("on.device=cuda", "on.precision=fp32"), CONVOLUTIONS),
        (("on.device=cuda", "on.precision=tf32"), NORMS),
        (("on.device=cuda", "on.precision=bf16"), NORMS),
        (("on.precision=fp32",), NORMS),
    ]:
        plan, network = planned("resnet20", FUSED, *words)
        forms = fuse(network, plan)
        assert {forms[f"stage{stage}/unit{unit}"] for stage in (1, 2, 3) for unit in (1, 2)} == {form}, words
        assert forms["stem"] == NORMS
        narrow = [module for module in network.modules() if isinstance(module, NarrowConv)]
        assert len(narrow) == 18
        assert {module.fused for module in narrow} == {form == CONVOLUTIONS}


def test_weights_are_copied_once_in_a_step() -> None:
    plan = make_plan("model=resnet14", "data.side=32", "norm_batch=16", "on.precision=bf16", FUSED)
    whole = Whole(plan, WORLD)
    units = [unit for unit in whole.module if isinstance(unit, ResidualUnit)]
    layers = [layer for unit in units for layer in unit.modules() if isinstance(layer, nn.Conv2d)]
    assert len(layers) == 16
    whole._begin()
    for layer in layers:
        copy = layer.step_weight
        assert isinstance(copy, torch.Tensor)
        assert copy.dtype == torch.bfloat16
        assert copy.stride() == layer.weight.stride()
        assert torch.equal(copy, layer.weight.bfloat16())
    for unit in units:
        widening = [unit.conv3, *([unit.projection] if unit.projects else [])]
        for layer in widening:
            wide = wide_weight(layer, torch.bfloat16)
            assert wide is layer.wide_step_weight
            assert wide.dtype == torch.float32
            assert torch.equal(wide, layer.weight.bfloat16().float()), "the numbers that are multiplied by"
    before = [compute_weight(layer, torch.float32) for layer in layers]
    with torch.no_grad():
        layers[0].weight.add_(1)
        layers[1].weight.data = layers[1].weight.data - 1  # as an optimizer does that moves weights to flat memory
    assert not torch.equal(before[0], layers[0].weight.bfloat16())
    whole._begin()
    assert all(copy is layer.step_weight for copy, layer in zip(before, layers, strict=True))
    for copy, layer in zip(before[:2], layers, strict=False):
        assert torch.equal(copy, layer.weight.bfloat16())
    assert not any("step_weight" in name for name in whole.module.state_dict())


def test_weights_that_have_the_type_already_are_not_copied() -> None:
    plan, network = planned("resnet14", FUSED)
    fuse(network, plan)
    weights = StepWeights(network, torch.float32)
    weights.refresh()
    layer = network.get_submodule("stage1/unit1.conv1")
    assert not weights._copies
    assert not hasattr(layer, "step_weight")
    assert not hasattr(network.get_submodule("stem.conv"), "step_weight")


NARROW = "{name: resnext11, wide: true, cardinality: 16, group_width: 4}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((f"model={NARROW}", "data.side=8", "norm_batch=8", "on.micro_batch=16"), 3),
        ((f"model={NARROW}", "data.side=8", "optimizer={name: lars, lr: 1}"), 3),
        (("model=resnet11-bottleneck", "norm_batch=8", "on.micro_batch=8", "on.recompute=all"), 1),
        (("model=resnet8",), 0),
    ],
)
def test_two_steps_with_fused_blocks_are_the_plain_ones(
    words: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "ROWS_PER_CHANNEL", 0.01)
    states = []
    for kernels in ("plain", "fused"):
        session = make_session(make_plan(*words, "on.precision=fp64", f"on.kernels={kernels}"))
        steps = session.loader.training(0)
        for _ in range(2):
            take_step(session, next(steps))
        whole = session.state.network
        assert isinstance(whole, Whole)
        assert list(whole.forms.values()).count(BOTTLENECK) == (expected if kernels == "fused" else 0)
        states.append({**whole.module.state_dict(), "sums": session.state.sums})
    plain, fused = states
    assert list(plain) == list(fused)
    for name, values in plain.items():
        assert torch.allclose(fused[name], values, rtol=1e-12, atol=1e-12 * float(values.abs().max())), name


@pytest.mark.parametrize(
    ("model", "norm", "block", "side", "fused"),
    [
        ("resnet10", BATCH, "stem", 32, STEM),
        ("resnet10", GROUP, "stage1/unit1", 32, NORMS),
        ("{name: vgg11, head: mean}", BATCH, "stage1/conv1", 32, RELU),
        ("googlenet", BATCH, "inception3b", 32, NORMS),
        pytest.param("efficientnet-cifar", BATCH, "stage2/unit1", 32, EXPANSION_AND_SQUEEZE, marks=pytest.mark.long),
        ("mobilenet-v3-small", BATCH, "stage1/unit1", 32, SQUEEZE),
        ("mobilenet-v3-small", BATCH, "stage2/unit1", 32, EXPANSION),
        ("mobilenet-v3-small", PROXY, "stage2/unit1", 32, NORMS),
        pytest.param("{name: inception-v3, auxiliary: 0}", BATCH, "mixed5b", 75, NORMS, marks=pytest.mark.long),
    ],
)
def test_a_pass_with_fused_blocks_is_the_plain_one(
    model: str, norm: tuple[str, ...], block: str, side: int, fused: str
) -> None:
    words = (f"model={model}", f"data.side={side}", *norm, "on.micro_batch=16", "on.precision=fp64", FUSED)
    plan = make_plan(*words)
    whole, batches, gradients = Whole(plan, WORLD), next(open_loader(plan, None, 0, WORLD.device).training(0)), []
    for form in (fused, PLAIN):
        assert whole.forms[block] == form
        whole.forward_backward(batches)
        gradients.append(torch.cat([p.grad.flatten() for p in whole.parameters if p.grad is not None]))
        for parameter in whole.parameters:
            parameter.grad = None
        for module in whole.module.modules():
            for name in ("fused", "expands"):  # the classes say that none is
                module.__dict__.pop(name, None)
        whole.forms = fuse(whole.module, make_plan(*words[:-1]))
    assert distance(*gradients) < 1e-12


def test_kernels_change_rounding_and_graphs_change_nothing() -> None:
    assert "kernels" in placement.keys("arithmetic")
    assert "graphs" in placement.keys("layout")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with Triton."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    return monkeypatch


def test_kernels_are_fused_where_they_pay_and_nobody_else_fuses(triton: pytest.MonkeyPatch) -> None:
    cuda = "on.device=cuda"
    for words, kernels in [
        ((cuda,), "fused"),
        ((cuda, "on.precision=fp16"), "fused"),
        ((cuda, "on.precision=fp32"), "fused"),
        ((cuda, "on.precision=tf32"), "fused"),
        ((cuda, "on.compile=true"), "plain"),
        ((cuda, "on.kernels=plain"), "plain"),
        ((cuda, "on.precision=fp64"), "plain"),
        ((cuda, "on.precision=fp64", FUSED), "fused"),
        (("on.precision=bf16",), "plain"),
        ((FUSED,), "fused"),
    ]:
        assert make_plan(*words).placement.kernels == kernels, words
    triton.setattr(importlib.util, "find_spec", lambda name: None)
    assert make_plan(cuda).placement.kernels == "plain"


def test_steps_of_one_replica_on_cuda_are_recorded_unless_the_network_is_compiled() -> None:
    for words, graphs in [
        (("on.device=cuda",), True),
        (("on.device=cuda", "on.graphs=false"), False),
        (("on.device=cuda", "on.graphs=true"), True),
        (("on.device=cuda", "on.offload=optimizer"), False),
        (("on.device=cuda", "on.replicas=2"), False),
        (("on.device=cuda", "on.compile=true"), False),
        ((), False),
        (("on.graphs=false",), False),
    ]:
        assert make_plan(*words).placement.graphs is graphs, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((FUSED, "on.compile=true"), "on.kernels=fused and on.compile=true both fuse the network; leave one of them"),
        (("on.graphs=true",), "on.graphs=true records a step of one replica on a CUDA device, and on.device is cpu;"),
        (("on.graphs=true", "on.device=cuda", "on.replicas=2"), "and 2 replicas exchange gradients in it; leave it"),
        (("on.graphs=true", "on.device=cuda", "on.compile=true"), "and on.compile is true; leave it out"),
        (
            ("on.graphs=true", "on.device=cuda", "on.offload=optimizer"),
            "and on.offload moves the optimizer's state in it",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError) as told:
        make_plan(*words)
    assert message in str(told.value)
