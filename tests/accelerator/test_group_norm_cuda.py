"""Group norm and proxy norm by fused kernels, on CUDA: near float64, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.norm import GroupNormAct, ProxyNormAct
from paceline.settings.model import Activation

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def passes(norm: GroupNormAct, x: Tensor, dy: Tensor, shortcut: Tensor | None, fused: bool) -> list[Tensor]:
    """Output and all gradients."""
    norm.fused, x = fused, x.detach().requires_grad_()
    with torch.autocast("cuda", x.dtype, enabled=x.dtype == torch.bfloat16):
        y = norm(x, None, shortcut)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], dy.to(y.dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("activation", "proxy", "beside"), [("relu", False, True), ("silu", False, False), ("silu", True, False)]
)
@pytest.mark.parametrize(("channels", "side"), [(64, 56), (144, 28), (1152, 7)])
def test_a_fused_pass_is_no_further_from_float64_than_autocast(
    channels: int, side: int, activation: Activation, proxy: bool, beside: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    if proxy:
        norm: GroupNormAct = ProxyNormAct(channels, 4, 1e-5, 0.03, activation)
    else:
        norm = GroupNormAct(channels, 4, 1e-5, activation)
    norm.cuda()
    means = torch.linspace(-3, 3, channels, device="cuda")[:, None, None]
    x, dy, shortcut = (torch.randn(8, channels, side, side, device="cuda") + means for _ in range(3))
    x, dy, shortcut = (each.to(dtype).contiguous(memory_format=torch.channels_last) for each in (x, dy, shortcut))
    fused, again, plain = (passes(norm, x, dy, shortcut if beside else None, form) for form in (True, True, False))
    assert all(map(torch.equal, fused, again))
    exact = passes(norm.double(), x.double(), dy.double(), shortcut.double() if beside else None, False)
    for one, other, value in zip(fused, plain, exact, strict=True):
        ours, theirs = (float((each.double() - value).norm() / value.norm()) for each in (one, other))
        print(f"{tuple(value.shape)}: fused {ours:.2e}, autocast {theirs:.2e}")
        # Group norm's output is rounded to 16 bits, as batch norm's is; autocast's has 32.
        assert ours <= 1.2 * theirs + (1e-5 if dtype == torch.float32 else 1e-4 if proxy else 4e-3)
