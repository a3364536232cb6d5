"""Squeeze-and-excite fused with the batch norm before it, on CUDA: near float64, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.batch import Batch
from paceline.model.kernels.squeeze import fused_squeeze
from paceline.model.mobile import SqueezeExcite
from paceline.model.mobile_tables import Squeeze
from paceline.model.norm import BatchNormAct
from paceline.settings.model import Activation

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def passes(norm: BatchNormAct, excite: SqueezeExcite, x: Tensor, dy: Tensor, fused: bool) -> list[Tensor]:
    """Output and all gradients of a pass over two norm groups."""
    x = x.detach().requires_grad_()
    batch = Batch(torch.zeros(2, 2 * x.shape[1], device="cuda", dtype=norm.weight.dtype))
    with torch.autocast("cuda", x.dtype, enabled=x.dtype == torch.bfloat16):
        y = fused_squeeze(norm, excite, x, batch) if fused else excite(norm(x, batch))
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters(), *excite.parameters()], dy)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "hardswish"])
@pytest.mark.parametrize(("channels", "side"), [(32, 56), (144, 28), (1152, 7)])
def test_a_fused_pass_is_no_further_from_float64_than_autocast(
    channels: int, side: int, activation: Activation, dtype: torch.dtype
) -> None:
    norm, excite = BatchNormAct(channels, 0.1, 1e-3, activation), SqueezeExcite(channels, Squeeze(8, "silu", "sigmoid"))
    norm.index, norm.offset = 0, 0
    norm.cuda()
    excite.cuda()
    x, dy = (torch.randn(8, channels, side, side, device="cuda").to(dtype) for _ in range(2))
    x, dy = (each.contiguous(memory_format=torch.channels_last) for each in (x, dy))
    fused, again, plain = (passes(norm, excite, x, dy, form) for form in (True, True, False))
    assert all(map(torch.equal, fused, again))
    exact = passes(norm.double(), excite.double(), x.double(), dy.double(), False)
    for one, other, value in zip(fused, plain, exact, strict=True):
        ours, theirs = (float((each.double() - value).norm() / value.norm()) for each in (one, other))
        print(f"{tuple(value.shape)}: fused {ours:.2e}, autocast {theirs:.2e}")
        assert ours <= 1.2 * theirs + (1e-3 if dtype == torch.bfloat16 else 1e-5)
