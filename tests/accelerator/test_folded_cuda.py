"""Evaluation on CUDA: folded and recorded, near float64, and by the weights of the moment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_session
from paceline.model.norm import BatchNormAct
from paceline.model.recorded import Recorded
from paceline.model.whole import Whole
from paceline.training.evaluate import evaluate_network
from paceline.training.session import torch_settings
from paceline.training.step import take_step
from paceline.world import World

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def evaluated(model: str, side: int, *words: str) -> Whole:
    """A network whose norms have seen something, the same numbers whatever the placement."""
    plan = make_plan(f"model={model}", f"data.side={side}", "norm_batch=16", "on.device=cuda", *words)
    whole = Whole(plan, World(torch.device("cuda", 0)))
    generator = torch.Generator("cuda").manual_seed(0)

    def fill(values: Tensor, middle: float, spread: float) -> None:
        noise = torch.randn(values.shape, generator=generator, device="cuda")  # in float32, whatever the values are
        values.copy_(noise.clamp(-3, 3) * spread + middle)

    for parameter in whole.module.parameters():
        fill(parameter.data, 0, parameter[0].numel() ** -0.5)
    for norm in whole.module.modules():
        if isinstance(norm, BatchNormAct):
            fill(norm.weight.data, 1, 0.2)
            fill(norm.bias.data, 0, 0.1)
            fill(norm.running_mean, 0, 0.1)
            fill(norm.running_var, 1, 0.2)
    return whole


def pictures(count: int, side: int) -> Tensor:
    images = torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(1))
    return images.to("cuda", torch.uint8).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("precision", "deterministic"), [("bf16", "true"), ("bf16", "false"), ("fp16", "true")])
@pytest.mark.parametrize(
    ("model", "side"),
    [
        ("resnet50", 96),
        ("{name: resnet50, version: v1}", 64),
        ("resnext50", 64),
        ("efficientnet-b0", 96),
        ("mobilenet-v3-small", 64),
        ("{name: inception-v3, auxiliary: 0}", 96),
        ("resnet20", 32),
    ],
)
def test_evaluation_is_no_further_from_float64_than_autocast(
    model: str, side: int, precision: str, deterministic: str
) -> None:
    words = (f"on.precision={precision}", f"on.deterministic={deterministic}")
    folded, plain = evaluated(model, side, *words), evaluated(model, side, *words, "on.kernels=plain")
    exact = evaluated(model, side, "on.precision=fp64")
    images = pictures(24, side)
    with torch_settings(folded.plan.placement):
        ours = [folded.scores(images) for _ in range(3)]  # called, recorded and replayed, replayed
        theirs, value = plain.scores(images), exact.scores(images)
    assert isinstance(folded._evaluator, Recorded)
    assert folded.evaluation_fault is None
    assert all(torch.equal(each, ours[0]) for each in ours)
    away, autocast = (float((each.double() - value).norm() / value.norm()) for each in (ours[0], theirs))
    print(f"{model}, {precision}: folded {away:.2e}, autocast {autocast:.2e}")
    assert away <= 1.3 * autocast + 1e-3


@pytest.mark.parametrize("model", ["resnet50", "efficientnet-b0"])
def test_batches_of_several_shapes_do_not_disturb_each_other(model: str) -> None:
    whole = evaluated(model, 64, "on.precision=bf16", "on.deterministic=true")
    with torch_settings(whole.plan.placement):
        batches = [pictures(count, 64) for count in (1, 7, 32)]
        first = [whole.scores(batch) for batch in batches]
        for _ in range(2):
            again = [whole.scores(batch) for batch in reversed(batches)]
            assert all(map(torch.equal, first, reversed(again)))


def test_a_validation_sees_the_weights_of_now() -> None:
    losses = []
    for graphs in ("true", "false"):
        words = ("on.precision=bf16", "on.deterministic=true", "on.micro_batch=4", f"on.graphs={graphs}")
        plan = make_plan("on.device=cuda", *words)
        with torch_settings(plan.placement):
            session = make_session(plan, world=World(torch.device("cuda", 0)))
            batches = session.loader.training(0)
            for _ in range(4):
                take_step(session, next(batches))
                losses.append(evaluate_network(session).row["loss"])
            assert session.state.network._evaluator is None
    assert losses[:4] == losses[4:]
    assert len(set(losses)) == 4


def test_what_cannot_be_recorded_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluated("resnet8", 8, "on.precision=bf16", "on.deterministic=true")
    images = pictures(4, 8)
    with torch_settings(whole.plan.placement):
        expected = whole.scores(images)
        normalize = whole.augment.normalize.forward

        def waiting(images: Tensor) -> Tensor:
            images.sum().item()  # the host waits, which no graph can
            return normalize(images)

        monkeypatch.setattr(whole.augment.normalize, "forward", waiting)
        for _ in range(2):
            assert torch.equal(whole.scores(images), expected)
    assert whole.evaluation_fault is not None
    torch.cuda.synchronize()
