"""Batch norms, plain and fused, and all that they compute, for the tests of fused norms."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from paceline import keyed
from paceline.model.batch import Batch
from paceline.model.kernels.rows import NormNumbers
from paceline.model.norm import BatchNormAct
from paceline.settings.model import Activation

ACTIVATIONS: tuple[Activation | None, ...] = (None, "relu", "relu6", "silu", "hardswish")


def numbers(name: str, *shape: int) -> Tensor:
    """Keyed normal numbers in float64 with a standard deviation of 2, a little off zero."""
    count = int(torch.Size(shape).numel())
    return torch.from_numpy(keyed.normals(keyed.key(0, name), count)).view(shape) * 2 + 0.4


def make_norms(channels: int, activation: Activation | None) -> tuple[BatchNormAct, BatchNormAct]:
    """Two norms in float64 with the same scales and shifts, the first one fused."""
    norms = [BatchNormAct(channels, 0.1, 1e-5, activation).double() for _ in range(2)]
    for norm in norms:
        norm.offset, norm.fused = 0, norm is norms[0]
        with torch.no_grad():
            norm.weight.copy_(2 * numbers("weight", channels))
            norm.bias.copy_(numbers("bias", channels))
    return norms[0], norms[1]


def factors_of(images: int) -> Tensor:
    """A mask of stochastic depth that leaves out about a third of the images."""
    return (numbers("mask", images) > -0.6).double() * 1.5


def passes(
    norm: BatchNormAct, x: Tensor, groups: int, shortcut: bool, masked: bool, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Output, statistics and all gradients of a forward and a backward pass; numbers fit into `dtype`, if given."""
    x = x.clone().requires_grad_()
    beside, dy = (numbers(name, *x.shape).to(dtype or x.dtype).to(x) for name in ("beside", "dy"))
    beside.requires_grad_()
    statistics = torch.full((groups, 2 * x.shape[1]), 7.0).to(norm.weight)
    y = norm(x, Batch(statistics), beside if shortcut else None, factors_of(len(x)).to(x) if masked else None)
    inputs = [x, norm.weight, norm.bias, *([beside] if shortcut else [])]
    return [y.detach(), statistics, *torch.autograd.grad(y, inputs, dy)]


def row_passes(
    kernels: ModuleType,
    dy: Tensor,
    x: Tensor,
    activation: Activation | None,
    shortcut: Tensor | None = None,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """What each function over rows gives for [groups, rows, channels], one after another."""
    groups, count, channels = x.shape
    weight, bias = (numbers(name, channels).to(x.device, torch.float32) for name in ("weight", "bias"))
    mean, var = kernels.moments(x)
    statistics = torch.zeros(groups, 2 * channels + 3, device=x.device)
    slots = statistics[:, 1 : channels + 1], statistics[:, channels + 1 : 2 * channels + 1]
    inverse, scale, shift = kernels.forward_constants(mean, var, weight, bias, 1e-5, count, slots, 2)
    y = kernels.scale_shift(x, scale, shift, activation, shortcut, mask)
    results = {"mean": mean, "var": var, "inverse": inverse, "scale": scale, "shift": shift}
    results |= {"statistics": statistics, "y": y}
    written = torch.zeros_like(statistics)
    slots = written[:, 1 : channels + 1], written[:, channels + 1 : 2 * channels + 1]
    at_once = kernels.normed_moments(x, NormNumbers(weight, bias, 1e-5, slots))
    assert all(map(torch.equal, at_once, (mean, inverse, scale, shift)))
    assert torch.allclose(written, 2 * statistics, rtol=1e-6), "of one replica in place of two"
    outs = [None, y] if shortcut is not None and activation in ("relu", "relu6") else [None]
    for out in outs:
        sums, moments, dz = kernels.gradient_sums(dy, x, scale, shift, activation, shortcut, mask, out)
        assert (dz is None) == (shortcut is None)
        a, b, c, dweight, dbias = kernels.backward_constants(sums, moments, mean, inverse, weight, count)
        d, behind = (dy, activation) if dz is None else (dz, None)
        dx = kernels.norm_gradient(d, x, scale, shift, a, b, c, behind, mask)
        here = {"sums": sums, "moments": moments, "a": a, "b": b, "c": c, "dx": dx, "dz": d}
        here |= {"dweight": dweight, "dbias": dbias}
        results |= {name if out is None else f"{name} by output": value for name, value in here.items()}
    return results
