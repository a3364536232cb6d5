"""3x3 convolutions of few channels in float32 on CUDA: our kernels against cuDNN's, and how far both are from float64.

Every figure is the least of several replays of a CUDA graph that holds the work several times. cuDNN has its choice of
kernels, with images channels-last and channel by channel.

    python benchmarks/convolution_speed.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.kernels import convolution_triton

SHAPES = [(16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1), (64, 64, 56, 1)]
"""Channels that go in and come out, side and stride: those of a ResNet-20, and one of a ResNet-18 at 224 pixels."""
REPEATS, REPLAYS = 20, 4
LAYOUTS = {"channels-last": torch.channels_last, "channel by channel": torch.contiguous_format}
Work = Callable[[], Tensor]


def microseconds(work: Work) -> float:
    """How long the work takes on the device."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPEATS)
    return min(times)


def ours(data: Sequence[Tensor], stride: int) -> dict[str, Work]:
    x, weight, dy = data
    return {
        "output": lambda: convolution_triton.convolved(x, weight, stride),
        "input's gradient": lambda: convolution_triton.picture_gradient(dy, weight, x.shape, stride),
        "weight's gradient": lambda: convolution_triton.weight_gradient(x, dy, stride),
    }


def cudnn(data: Sequence[Tensor], stride: int) -> dict[str, Work]:
    x, weight, dy = data

    def gradient(index: int) -> Tensor:
        wanted = [index == 0, index == 1, False]
        backward = torch.ops.aten.convolution_backward
        gradients: list[Tensor] = backward(
            dy, x, weight, None, [stride] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1, wanted
        )
        return gradients[index]

    return {
        "output": lambda: F.conv2d(x, weight, None, stride, 1),
        "input's gradient": lambda: gradient(0),
        "weight's gradient": lambda: gradient(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    images = parser.parse_args().images
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    print(
        "| channels, side, stride | what | ours | cuDNN, channels-last | channel by channel | ours, error | cuDNN's |"
    )
    print("|---|---|---|---|---|---|---|")
    for inputs, outputs, side, stride in SHAPES:
        half = (side - 1) // stride + 1
        shapes = (images, inputs, side, side), (outputs, inputs, 3, 3), (images, outputs, half, half)
        drawn = [torch.randn(shape, device="cuda") for shape in shapes]
        exact = cudnn([each.double() for each in drawn], stride)
        last = [each.contiguous(memory_format=torch.channels_last) for each in drawn]
        works = {"ours": ours(last, stride)}
        for name, layout in LAYOUTS.items():
            works[name] = cudnn([each.contiguous(memory_format=layout) for each in drawn], stride)
        for what, work in exact.items():
            value = work()
            times = " | ".join(f"{microseconds(each[what]):.1f} us" for each in works.values())
            errors = [float((works[name][what]() - value).norm() / value.norm()) for name in ("ours", "channels-last")]
            print(
                f"| {inputs} to {outputs}, {side}, {stride} | {what} | {times} | {errors[0]:.1e} | {errors[1]:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
