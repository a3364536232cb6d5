"""Squeeze-and-excite fused with the batch norm before it: the plain layers' numbers, in both passes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from interpreted import interpret_kernels
from paceline.model.batch import Batch
from paceline.model.kernels import gate
from paceline.model.kernels.squeeze import fused_squeeze
from paceline.model.mobile import SqueezeExcite
from paceline.model.mobile_tables import Squeeze
from paceline.model.norm import BatchNormAct
from paceline.settings.model import Activation

ACTIVATIONS: list[Activation | None] = ["silu", "hardswish", "relu", "relu6", None]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_pass_is_the_plain_one_in_float64(activation: Activation | None, groups: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        norm = BatchNormAct(8, 0.1, 1e-3, activation)
        norm.index, norm.offset = 0, 0
        excite = SqueezeExcite(8, Squeeze(4, "silu", "sigmoid"))
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
        images = (torch.randn(6, 8, 5, 4) + 3).contiguous(memory_format=torch.channels_last).requires_grad_()
        dy = torch.randn(6, 8, 5, 4)
        found = []
        for fused in (True, False):
            statistics = torch.zeros(groups, 16)
            batch = Batch(statistics)
            y = fused_squeeze(norm, excite, images, batch) if fused else excite(norm(images, batch))
            inputs = [images, *norm.parameters(), *excite.parameters()]
            found.append([y, statistics, *torch.autograd.grad(y, inputs, dy)])
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_pass_that_is_computed_again_has_the_same_gradients() -> None:
    norm, excite = BatchNormAct(8, 0.1, 1e-3, "silu"), SqueezeExcite(8, Squeeze(4, "silu", "sigmoid"))
    norm.index, norm.offset = 0, 0
    images, dy = torch.randn(2, 6, 8, 5, 4)
    images.requires_grad_()
    batch, found = Batch(torch.zeros(2, 16)), []
    for compute in (fused_squeeze, _again):
        y = compute(norm, excite, images, batch)
        found.append([y, *torch.autograd.grad(y, [images, *norm.parameters(), *excite.parameters()], dy)])
    assert all(map(torch.equal, *found))


def _again(norm: BatchNormAct, excite: SqueezeExcite, x: Tensor, batch: Batch) -> Tensor:
    y = checkpoint(fused_squeeze, norm, excite, x, batch, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(y, Tensor)
    return y


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels, interpreted, with small tiles and several chunks."""
    interpret_kernels()
    from paceline.model.kernels import gate_triton

    monkeypatch.setattr(gate_triton, "ELEMENTS", 512)
    return gate_triton


def case(channels: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Data of two groups of two images each, what belongs to a group, and what belongs to an image."""
    data = [torch.randn(2, 2 * 45, channels) for _ in range(2)]
    return data, [torch.randn(2, channels) for _ in range(6)], [torch.rand(4, channels) for _ in range(2)]


@pytest.mark.parametrize("channels", [5, 32, 72])
@pytest.mark.parametrize("activation", ["silu", "hardswish", "relu", None])
def test_interpreted_kernels_have_the_numbers_of_their_twins(
    ours: ModuleType, activation: Activation | None, channels: int
) -> None:
    (d, x), (mean, scale, shift, *constants), (factors, term) = case(channels)
    found = [
        (
            kernels.image_means(x, scale, shift, activation, 4),
            kernels.gated(x, scale, shift, activation, factors),
            *kernels.gate_sums(d, x, mean, scale, shift, activation, 4),
            kernels.gated_gradient(d, x, scale, shift, activation, factors, term, tuple(constants)),
        )
        for kernels in (ours, gate)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "hidden"), [(5, 3), (72, 18)])
@pytest.mark.parametrize(("activation", "gate_name"), [("silu", "sigmoid"), ("relu", "hardsigmoid")])
def test_interpreted_factors_are_those_of_their_twin(
    ours: ModuleType, channels: int, hidden: int, activation: Activation, gate_name: str
) -> None:
    (x, _), (scale, shift, *_), _ = case(channels)
    first, second = torch.randn(hidden, channels) / channels**0.5, torch.randn(channels, hidden) / hidden**0.5
    excite = gate.Excite(first, torch.randn(hidden), second, torch.randn(channels), activation, gate_name)
    found = [kernels.image_factors(x, scale, shift, "silu", 4, excite) for kernels in (ours, gate)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
