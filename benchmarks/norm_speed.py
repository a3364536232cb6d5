"""Fused norms on CUDA: each kernel's share of the speed of a copy, and both passes against torch's own batch norm.

Every figure is the median over replays of a CUDA graph that holds the work several times; data are larger than the
cache where a network's are.

    python benchmarks/norm_speed.py
    python benchmarks/norm_speed.py --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.model.batch import Batch
from paceline.model.kernels import rows_triton
from paceline.model.norm import BatchNormAct
from paceline.settings.model import Activation

SHAPES: list[tuple[int, int, int, Activation, bool]] = [
    (512, 64, 112, "relu", False),
    (512, 64, 56, "relu", False),
    (512, 256, 56, "relu", True),
    (512, 512, 28, "relu", True),
    (512, 256, 14, "relu", False),
    (512, 2048, 7, "relu", True),
    (256, 96, 112, "silu", False),
    (256, 144, 56, "silu", False),
    (256, 1152, 7, "silu", False),
    (128, 16, 32, "relu", True),
    (512, 64, 32, "relu", True),
]
"""Images, channels, side, activation and whether there is a shortcut, in ResNet-50, EfficientNet-B0 and for CIFAR."""
REPEATS = 10


def microseconds(work: Callable[[], object]) -> float:
    """How long the work takes on the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPEATS)
    return statistics.median(times)


def time_kernels(x: Tensor, activation: Activation, shortcut: bool) -> str:
    """Microseconds of each kernel, and what a copy that moves as many bytes would take of them."""
    data = x.permute(0, 2, 3, 1).reshape(1, -1, x.shape[1])
    y, dy = torch.empty_like(data), torch.randn_like(data)
    beside = torch.randn_like(data) if shortcut else None
    out = dy if shortcut else None
    scale, shift, *factors = torch.rand(5, 1, x.shape[1], device="cuda")
    a, b, c = factors
    copy = microseconds(lambda: y.copy_(data)) / 2
    behind = None if shortcut else activation
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "moments": (1, lambda: rows_triton.moments(data)),
        "scale_shift": (2 + shortcut, lambda: rows_triton.scale_shift(data, scale, shift, activation, beside)),
        "gradient_sums": (
            2 + 2 * shortcut,
            lambda: rows_triton.gradient_sums(dy, data, scale, shift, activation, None, None, out),
        ),
        "norm_gradient": (3, lambda: rows_triton.norm_gradient(dy, data, scale, shift, a, b, c, behind)),
    }
    times = {name: (microseconds(work), tensors * copy) for name, (tensors, work) in works.items()}
    return "  ".join(f"{name} {time:6.1f} ({least / time:4.0%})" for name, (time, least) in times.items())


def time_passes(x: Tensor, activation: Activation, shortcut: bool, fused: bool) -> float:
    """Microseconds of a forward and a backward pass."""
    norm = BatchNormAct(x.shape[1], 0.1, 1e-5, activation).cuda()
    norm.offset, norm.fused = 0, fused
    x, batch = x.clone().requires_grad_(), Batch(torch.zeros(1, 2 * x.shape[1], device="cuda"))
    beside = torch.randn_like(x).requires_grad_() if shortcut else None
    dy, inputs = torch.randn_like(x), [x, norm.weight, norm.bias, *([] if beside is None else [beside])]
    return microseconds(lambda: torch.autograd.grad(norm(x, batch, beside), inputs, dy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    dtype = getattr(torch, parser.parse_args().dtype)
    print(f"{torch.cuda.get_device_name()}, {dtype}: microseconds (share of the speed of a copy)")
    for images, channels, side, activation, shortcut in SHAPES:
        x = torch.randn(images, channels, side, side, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        plain, fused = (time_passes(x, activation, shortcut, fused) for fused in (False, True))
        print(f"{images} x {channels} x {side} x {side} {activation}{' + shortcut' if shortcut else ''}")
        print(f"  plain {plain:.1f}, fused {fused:.1f}: {plain / fused:.2f} times as fast")
        print(f"  {time_kernels(x, activation, shortcut)}", flush=True)


if __name__ == "__main__":
    main()
