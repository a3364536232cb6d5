"""Steps that are recorded as CUDA graphs: bit for bit those that are not, whatever happens in a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conftest import SMALL, make_plan, make_session
from paceline.model.forms import BOTTLENECK
from paceline.settings import shipped
from paceline.training.session import Session, torch_settings
from paceline.training.step import take_step
from paceline.world import World

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FUSED = (
    "model={name: resnext11, wide: true, cardinality: 16, group_width: 4}",
    *("data.side=32", "global_batch=64", "norm_batch=16", "epochs=6"),
    *("on.precision=bf16", "on.kernels=fused", "on.micro_batch=16"),
)
"""Bottlenecks of which those of two stages have rows enough, and four micro-batches in a step."""


def trained(steps: int, *words: str, text: str = SMALL) -> Session:
    """A session after so many steps."""
    plan = make_plan("on.device=cuda", "on.deterministic=true", *words, text=text)
    device = torch.device("cuda", 0)
    with torch_settings(plan.placement):
        session = make_session(plan, world=World(device))
        batches = session.loader.training(0)
        for _ in range(steps):
            take_step(session, next(batches))
        torch.cuda.synchronize()
    return session


def numbers(session: Session) -> dict[str, Tensor]:
    """Everything that steps change."""
    state = session.state
    groups = {f"{group}/{name}": t for group, tensors in state.tensors().items() for name, t in tensors.items()}
    scale = {"scale": state.loss_scale.value, "good steps": state.loss_scale.good_steps}
    return {**groups, **scale, "sums": state.sums, "last sums": state.last_sums, "bad": state.bad}


def recordings(session: Session) -> int:
    """How many shapes of steps are recorded."""
    if session.graphs is None:
        return 0
    assert None not in session.graphs._recordings.values()
    return len(session.graphs._recordings)


def assert_equal_bits(steps: int, *words: str, recorded: int, text: str = SMALL) -> Session:
    """Steps with and without graphs leave the same bits, and the former record so many shapes; gives their session."""
    without, with_graphs = (trained(steps, *words, f"on.graphs={graphs}", text=text) for graphs in ("false", "true"))
    assert recordings(without) == 0
    assert recordings(with_graphs) == recorded
    theirs = numbers(without)
    for name, values in numbers(with_graphs).items():
        assert torch.equal(values, theirs[name]), name
    return with_graphs


def test_recorded_steps_have_the_bits_of_others() -> None:
    words = ("on.precision=fp32", "on.micro_batch=128")
    session = assert_equal_bits(6, *words, recorded=1, text=shipped.page("recipes", "shapes/resnet8")[0])
    assert not session.state.bad.any()


def test_recorded_steps_with_class_weights_have_the_bits_of_others() -> None:
    words = ("loss.class_weights=balanced", "loss.label_smoothing=0.1", "mix.mixup=0.2", "on.precision=fp32")
    assert_equal_bits(6, *words, "on.micro_batch=16", recorded=1)


def test_recorded_steps_of_fused_blocks_and_four_micro_batches_have_the_bits_of_others() -> None:
    session = assert_equal_bits(6, *FUSED, recorded=1)
    assert session.plan.rounds == 4
    assert list(session.state.network.forms.values()).count(BOTTLENECK) == 3
    assert not session.state.bad.any()


def test_another_image_side_is_recorded_again() -> None:
    words = ("augment.side={0 epochs: 6, 1 epochs: 8}", "augment.cutout=2", "mix.mixup=0.2", "mix.block=4", "epochs=2")
    assert_equal_bits(12, *words, "on.micro_batch=8", "on.precision=fp32", recorded=2)


def test_bad_steps_are_skipped_where_they_are_recorded_too() -> None:
    scale = "on.loss_scale={0 epochs: 1, 1 epochs: 16777216, 2 epochs: 1}"
    session = assert_equal_bits(18, "epochs=3", "on.precision=fp16", scale, "on.micro_batch=8", recorded=1)
    assert session.state.bad.tolist() == [0] * 6 + [1] * 6 + [0] * 6


def no_longer_called(_bad: object) -> None:
    raise AssertionError("a step was recorded, and its average was not")


@pytest.mark.parametrize("every", ["1 steps", "2 steps"])
def test_an_average_follows_recorded_steps_by_a_recording_of_its_own(
    monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    scale = "on.loss_scale={0 epochs: 1, 1 epochs: 16777216, 2 epochs: 1}"
    words = ("epochs=4", "on.precision=fp16", scale, "on.micro_batch=8", "ema.decay=0.9", f"ema.every={every}")
    session = assert_equal_bits(18, *words, recorded=1)
    assert session.state.bad.any()
    assert session.state.ema is not None
    monkeypatch.setattr(session.state.ema, "follow", no_longer_called)
    batches = session.loader.training(session.state.step)
    for _ in range(2):
        take_step(session, next(batches))


def test_a_dynamic_scale_moves_in_recorded_steps() -> None:
    session = assert_equal_bits(6, "on.precision=fp16", "on.loss_scale=dynamic", recorded=1)
    good = 6 - int(session.state.bad.sum())
    assert 0 < float(session.state.loss_scale.good_steps) <= good


def test_what_is_told_of_gradients_is_the_same_in_recorded_steps() -> None:
    words = (*FUSED, "on.histograms=2 steps", "report=2 steps")
    without, with_graphs = (trained(6, *words, f"on.graphs={graphs}") for graphs in ("false", "true"))
    assert recordings(with_graphs) == 1
    norm = float(with_graphs.gradient_norm.value)
    assert norm == float(without.gradient_norm.value) > 0
    assert with_graphs.histograms is not None
    assert without.histograms is not None
    assert with_graphs.histograms.read() == without.histograms.read()


def test_histograms_change_no_bit_of_recorded_steps() -> None:
    with_histograms, plain = (trained(6, *FUSED, "on.graphs=true", f"on.histograms={e}") for e in ("1 steps", "never"))
    theirs = numbers(plain)
    for name, values in numbers(with_histograms).items():
        assert torch.equal(values, theirs[name]), name
